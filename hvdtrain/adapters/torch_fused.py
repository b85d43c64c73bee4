"""PyTorch's optimizers with one kernel for the update of all parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as every

from hvdtrain.adapters.torch_state import is_dense

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


_Call = Callable[[], object]


def prefer(optimizer: torch.optim.Optimizer) -> None:
    """Let PyTorch update all parameters in one kernel, where its optimizer has one and the user has not chosen another way.

    On CPUs PyTorch's own choice is a loop over the parameters, with several passes over the memory of each.
    """
    if type(optimizer) not in _KINDS:
        return
    for group in optimizer.param_groups:
        ways = (
            group.get("foreach") is not None,
            group.get("fused") is not None,
            group.get("differentiable"),
            group.get("capturable"),
        )
        chosen = any(ways)
        plain = all(each.is_floating_point() and each.device.type == "cpu" and is_dense(each) for each in group["params"])
        if not chosen and plain and not isinstance(group["lr"], torch.Tensor) and not group.get("dampening"):
            group["fused"] = True


def step(optimizer: torch.optim.Optimizer) -> None:
    """One update. Where nobody can tell the difference it is the kernel alone: around it ``step()`` takes several times as long."""
    gather = _GATHERERS.get(type(optimizer))
    if gather is not None and not _is_watched(optimizer):
        calls = [gather(optimizer.state, group) for group in optimizer.param_groups]
        if all(calls):
            with torch.no_grad():
                for call in filter(None, calls):
                    call()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
            return
    _complete(optimizer)
    optimizer.step()


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """SGD's kernel fails where only some parameters have momentum yet.

    The first step without any makes it the gradient, as a step from zero does.
    """
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        if group["fused"] and group["momentum"]:
            states = [(parameter, optimizer.state[parameter]) for parameter in group["params"] if parameter.grad is not None]
            if any(state for _, state in states):
                for parameter, state in states:
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)


def intercepted(optimizer: torch.optim.Optimizer) -> str:
    """Who wants to be part of the optimizer's step(); empty if nobody does."""
    own = vars(optimizer)
    if own.get("_optimizer_step_pre_hooks") or own.get("_optimizer_step_post_hooks"):
        return "the optimizer has hooks"
    if every._global_optimizer_pre_hooks or every._global_optimizer_post_hooks:
        return "all optimizers have hooks"
    if "step" in own and getattr(own["step"], "__wrapped__", None) is not type(optimizer).step:  # a scheduler counts steps only
        return "the optimizer's step() was replaced"
    return ""


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() does more than the kernel, or somebody looks on."""
    scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    profiled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return scaled or profiled or bool(intercepted(optimizer))


def _updated(group: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """The parameters of ``group`` that have gradients, and these, if one kernel can update them; else None."""
    if group["fused"] is not True or isinstance(group["lr"], torch.Tensor) or group.get("capturable"):
        return None
    parameters: list[Any] = []
    gradients: list[torch.Tensor] = []
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not parameter.is_cpu or gradient.is_sparse or (parameters and parameter.dtype is not parameters[0].dtype):
            return None
        parameters.append(parameter)
        gradients.append(gradient)
    return parameters, gradients


def _nothing() -> None:
    pass


def _sgd(states: Mapping[Any, Any], group: dict[str, Any]) -> _Call | None:
    if (found := _updated(group)) is None:
        return None
    parameters, gradients = found
    if not parameters:
        return _nothing
    momenta = [states[parameter].get("momentum_buffer") for parameter in parameters] if group["momentum"] else []
    if any(momentum is None for momentum in momenta):
        return None
    return lambda: torch._fused_sgd_(
        parameters,
        gradients,
        momenta,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _adam(states: Mapping[Any, Any], group: dict[str, Any], *, decoupled: bool = False) -> _Call | None:
    beta1, beta2 = group["betas"]
    if (found := _updated(group)) is None or isinstance(beta1, torch.Tensor) or isinstance(beta2, torch.Tensor):
        return None
    parameters, gradients = found
    if not parameters:
        return _nothing
    own = [states[parameter] for parameter in parameters]
    if not all(own):
        return None
    kernel = torch._fused_adamw_ if group.get("decoupled_weight_decay", decoupled) else torch._fused_adam_

    def call() -> None:
        steps = [state["step"] for state in own]
        torch._foreach_add_(steps, 1)
        kernel(
            parameters,
            gradients,
            [state["exp_avg"] for state in own],
            [state["exp_avg_sq"] for state in own],
            [state["max_exp_avg_sq"] for state in own] if group["amsgrad"] else [],
            steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    return call


#: What gathers a kernel's arguments, and gives None where ``step()`` has to come first: it makes the optimizer's state.
_GATHERERS: dict[type, Callable[[Mapping[Any, Any], dict[str, Any]], _Call | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
}
