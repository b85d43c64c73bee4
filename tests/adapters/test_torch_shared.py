"""Updates in shared memory: every optimizer, between two ranks that are threads, against one process."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdtrain.adapters import torch_fused, torch_shared  # noqa: E402
from hvdtrain.errors import UsageError  # noqa: E402
from hvdtrain.update import Update  # noqa: E402
from tests.comm.test_shared import Mapped, together  # noqa: E402

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.005),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.005, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov, no kernel": lambda p: torch.optim.SGD(p, 0.005, momentum=0.9, nesterov=True, foreach=False),
    "SGD, dampening, an empty group": lambda p: torch.optim.SGD(
        [{"params": p}, {"params": []}], 0.005, momentum=0.9, dampening=0.5
    ),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
}
STEPS = 6


class Model(torch.nn.Module):
    """With a layer that is not used at first, a single number, and an image layer in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.first, self.late = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7)
        self.image = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, inputs: Any, step: int) -> Any:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.late(hidden)) if step >= 2 else hidden
        images = self.image(hidden[:, :1, None, None].expand(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
        return (hidden.sum(1) + images.sum((1, 2, 3))) * self.scale


def backward(model: Any, step: int, part: slice, weight: float) -> None:
    inputs = torch.from_numpy(np.random.default_rng(step).normal(size=(8, 5)).astype(np.float32))[part]
    for parameter in model.parameters():
        parameter.grad = None
    ((model(inputs, step) - 1.0) ** 2).mean().mul(weight).backward()


def communicator(path: Path, rank: int) -> Any:
    world = SimpleNamespace(rank=rank, local_rank=rank, size=2, local_size=2, num_nodes=1)
    return SimpleNamespace(world=world, share=lambda nbytes: Mapped(path, rank, 2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_update_their_shares_as_one_process_updates_everything(tmp_path, name):
    alone = Model()
    optimizer = OPTIMIZERS[name](alone.parameters())
    for step in range(STEPS):
        backward(alone, step, slice(8), 1.0)
        optimizer.step()
    models, optimizers, lock = [Model(), Model()], {}, threading.Lock()

    def body(rank: int) -> None:
        model = models[rank]
        with lock:
            own = optimizers[rank] = OPTIMIZERS[name](model.parameters())
            torch_fused.prefer(own)
            plan = torch_shared.plan(model, own, Update())
        assert isinstance(plan, torch_shared.Plan)
        assert not plan.whole
        exchange = torch_shared.SharedExchange(plan, own, communicator(tmp_path / "memory", rank))
        for step in range(STEPS):
            exchange.begin(1)
            part = slice(5) if rank == 0 else slice(5, 8)
            backward(model, step, part, 5 / 8 if rank == 0 else 3 / 8)
            summed = exchange.finish([1.0])
            assert summed.numbers == [2.0]
            exchange.update()
        exchange.settle()

    together(2, body)
    for parameter, mine, theirs in zip(alone.parameters(), models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()  # two mappings of one memory
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, parameter, rtol=2e-5, atol=2e-5)
        for rank_state in (optimizers[0].state[mine], optimizers[1].state[theirs]):
            assert rank_state.keys() == {key for key, value in optimizer.state[parameter].items() if value is not None}
            for key, value in rank_state.items():
                torch.testing.assert_close(value, optimizer.state[parameter][key], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("make", "update", "why"),
    [
        (lambda p: torch.optim.Adafactor(p), Update(), "Adafactor is not known to update each element by itself"),
        (lambda p: torch.optim.SGD(p, 0.005), Update(precision="float16"), "scaling of float16"),
        (lambda p: torch.optim.Adam(p, 0.1, capturable=True), Update(), "differentiable or capturable"),
    ],
)
def test_what_cannot_be_updated_in_parts_is_updated_whole_with_the_reason(make, update, why):
    model = torch.nn.Linear(3, 2)
    assert why in torch_shared.plan(model, make(model.parameters()), update).whole


def test_an_optimizer_whose_steps_others_take_part_in_is_left_whole_but_for_schedulers():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert not torch_shared.plan(model, optimizer, Update()).whole
    optimizer.register_step_post_hook(lambda *_: None)
    assert "hooks" in torch_shared.plan(model, optimizer, Update()).whole


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.Embedding(4, 2, sparse=True), "sparse gradients"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double()), "not all float32"),
        (torch.nn.Linear(2, 2).bfloat16(), "not all float32"),
    ],
)
def test_models_that_have_no_place_in_shared_memory_say_why(model, why):
    assert why in torch_shared.plan(model, torch.optim.SGD(model.parameters(), 0.1), Update())


def test_who_changes_a_shared_parameter_is_told_its_name(tmp_path):
    caught: list[str] = []

    def body(rank: int) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exchange = torch_shared.SharedExchange(
            torch_shared.plan(model, optimizer, Update()), optimizer, communicator(tmp_path / "memory", rank)
        )
        exchange.begin(1)
        if rank == 0:
            model.bias.data = torch.zeros(2)
        else:
            with torch.no_grad():
                model.weight.mul_(0.5)
        with pytest.raises(UsageError) as error:
            exchange.begin(1)
        caught.append(error.value.message)

    together(2, body)
    assert sorted(message.split()[0] for message in caught) == ["bias", "weight"]
