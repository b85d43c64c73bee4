"""The kernel alone does what the optimizer's step does, bit by bit, and only where nobody can tell the difference."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdtrain.adapters import torch_fused, torch_state  # noqa: E402

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.99)}),
    "adagrad": (torch.optim.Adagrad, {}),
}


class CountedError(Exception):
    """The optimizer's own step was taken."""


def parameters(*, dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((5, 3), (7,), ())]


def gradients(own: list[Any], step: int, *, without: int | None = None) -> None:
    torch.manual_seed(1 + step)
    for number, parameter in enumerate(own):
        parameter.grad = None if number == without else torch.randn_like(parameter)


def forbid(optimizer: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise CountedError

    monkeypatch.setattr(type(optimizer), "step", refuse)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_step_bit_by_bit(name: str, dtype: Any) -> None:
    kind, options = OPTIMIZERS[name]
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    groups = lambda own: [{"params": own[:2]}, {"params": own[2:], "lr": 0.3}, {"params": []}]  # noqa: E731
    first, second = kind(groups(ours), 0.1, **options), kind(groups(theirs), 0.1, **options)
    for each in (first, second):
        torch_fused.prefer(each)
    for step in range(6):
        without = 1 if step == 3 else None
        gradients(ours, step, without=without)
        gradients(theirs, step, without=without)
        torch_fused.step(first)
        second.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in second.state[other].items():
            assert torch.equal(torch.as_tensor(first.state[mine][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adagrad"])
def test_after_the_first_step_it_is_the_kernel_alone(name: str, monkeypatch: Any) -> None:
    kind, options = OPTIMIZERS[name]
    own = parameters()
    optimizer = kind(own, 0.1, **options)
    torch_fused.prefer(optimizer)
    gradients(own, 0)
    torch_fused.step(optimizer)
    before = copy.deepcopy(own)
    forbid(optimizer, monkeypatch)
    gradients(own, 1)
    torch_fused.step(optimizer)
    assert not any(torch.equal(now, then) for now, then in zip(own, before, strict=True))


def _hook(optimizer: Any) -> Any:
    return optimizer.register_step_pre_hook(lambda *args: None).remove


def _hook_of_all(optimizer: Any) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(lambda *args: None).remove


def _replaced(optimizer: Any) -> Any:
    def refuse(self: Any) -> None:
        raise CountedError

    optimizer.step = types.MethodType(refuse, optimizer)
    return lambda: None


def _replaced_and_scheduled(optimizer: Any) -> Any:
    undo = _replaced(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return undo


def _profiled(optimizer: Any) -> Any:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    return profiler.stop


def _tensor_rate(optimizer: Any) -> Any:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    return lambda: None


def _own_choice(optimizer: Any) -> Any:
    optimizer.param_groups[0]["fused"] = False
    return lambda: None


@pytest.mark.parametrize(
    "watch", [_hook, _hook_of_all, _replaced, _replaced_and_scheduled, _profiled, _tensor_rate, _own_choice]
)
def test_who_watches_the_step_sees_it(watch: Any, monkeypatch: Any) -> None:
    own = parameters()
    optimizer = torch.optim.Adam(own, 0.1)
    torch_fused.prefer(optimizer)
    gradients(own, 0)
    torch_fused.step(optimizer)
    forbid(optimizer, monkeypatch)
    undo = watch(optimizer)
    try:
        with pytest.raises(CountedError):
            torch_fused.step(optimizer)
    finally:
        undo()


def test_a_scheduler_counts_the_steps_and_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    own = parameters()
    optimizer = torch.optim.SGD(own, 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    torch_fused.prefer(optimizer)
    for step in range(3):
        gradients(own, step)
        torch_fused.step(optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
    assert not [warning for warning in recwarn if "scheduler" in str(warning.message)]


def test_parameters_with_gaps_in_their_memory_keep_the_loop() -> None:
    whole = torch.zeros(4, 6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(whole[:, ::2])], 0.1)
    torch_fused.prefer(optimizer)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_state_that_was_sent_goes_on_in_the_order_of_elements_that_its_parameter_has(kind: Any) -> None:
    from hvdtrain.adapters.torch import TorchAdapter
    from hvdtrain.comm.local import LocalCommunicator
    from hvdtrain.world import World

    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(4, 3, 5, 5)).astype(np.float32), random.normal(size=(4, 8)).astype(np.float32)) for _ in range(5)
    ]

    def made() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        model.to(memory_format=torch.channels_last)
        adapter = TorchAdapter(model, kind(model.parameters(), 0.1, **options), loss=torch.nn.functional.mse_loss)
        adapter.setup(LocalCommunicator(World()))
        return adapter

    first, second = made(), made()
    for batch in batches[:3]:
        first.train_step(batch, lr=None, weight=1.0)
    # as it comes from another rank
    second._set_state(torch_state.map_leaves(first._state(), lambda tensor: tensor.contiguous().clone(), torch.Tensor))
    for batch in batches[3:]:
        for each in (first, second):
            each.train_step(batch, lr=None, weight=1.0)
    for mine, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, other)
