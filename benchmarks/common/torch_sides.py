"""PyTorch's sides: a hand-written loop without exchange, under DDP, and with Horovod's optimizer.

Batches lie in memory as tensors, so no side but hvdtrain spends time on loading. The loss is read every ten steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from . import tasks, torch_models
from .laps import Laps
from .tasks import Task


def none(task: Task, laps: Laps) -> None:
    """Every rank trains by itself."""
    model, optimizer = torch_models.build(task.name)
    _train(task, model, optimizer, laps)


def ddp(task: Task, laps: Laps) -> None:
    """DistributedDataParallel over Gloo; ``gradient_as_bucket_view`` is what its documentation has for memory and time."""
    os.environ |= {"RANK": str(laps.rank), "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"]}  # as torchrun sets them
    torch.distributed.init_process_group("gloo")
    model, optimizer = torch_models.build(task.name)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    _train(task, wrapped, optimizer, laps)
    torch.distributed.destroy_process_group()


def horovod(task: Task, laps: Laps) -> None:
    """As in Horovod's documentation, with its defaults."""
    import horovod.torch as hvd

    hvd.init()
    model, optimizer = torch_models.build(task.name)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    _train(task, model, wrapped, laps)
    hvd.shutdown()


def _train(task: Task, model: Any, optimizer: Any, laps: Laps) -> None:
    pairs = tasks.batches(task, laps.rank, channels_first=True)
    batches = [(torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in pairs]
    model.train()
    for step in range(task.steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = torch_models.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        laps.lap()
        if step % tasks.ROUND == tasks.ROUND - 1:
            loss.item()
    laps.write()


SIDES: dict[str, Callable[[Task, Laps], None]] = {"none": none, "ddp": ddp, "horovod": horovod}
