"""PyTorch's optimizers with one kernel for the update of all parameters."""

from __future__ import annotations

import torch

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


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
        plain = all(parameter.is_floating_point() and parameter.device.type == "cpu" for parameter in group["params"])
        if not chosen and plain and not isinstance(group["lr"], torch.Tensor) and not group.get("dampening"):
            group["fused"] = True


def step(optimizer: torch.optim.Optimizer) -> None:
    """One update.

    SGD's kernel fails where only some parameters have momentum yet. The first step without any makes it the gradient, as a
    step from zero does.
    """
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        if group["fused"] and group["momentum"]:
            states = [(parameter, optimizer.state[parameter]) for parameter in group["params"] if parameter.grad is not None]
            if any(state for _, state in states):
                for parameter, state in states:
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.step()
