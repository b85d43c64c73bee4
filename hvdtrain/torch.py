"""A PyTorch loop written for one process, on any number of ranks.

    model, optimizer, loader = hvdtrain.torch.prepare(model, optimizer, loader)

and the loop stays as it is: the loader gives each rank its part of each batch, and when ``backward()`` returns, the
gradients are those of the whole batch, ready to be clipped, unscaled and applied. ``batch_size`` is that of all ranks
together, so the result does not depend on their number.
"""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hvdtrain import consistency, script
from hvdtrain.adapters import torch_state
from hvdtrain.adapters.torch import check_optimizer, pick_device
from hvdtrain.adapters.torch_loop import Loop
from hvdtrain.comm import Communicator
from hvdtrain.data.sampler import Slice
from hvdtrain.data.torch import BatchSampler, DistributedSampler, RankLoader, batch_sampler
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.update import Op, Update

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "check",
    "count",
    "is_primary",
    "prepare",
    "rank",
    "shard",
    "size",
    "total",
]

log = logging.getLogger(__name__)

_numbers = itertools.count()
_loops: WeakKeyDictionary[torch.optim.Optimizer, Loop] = WeakKeyDictionary()


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *loaders: Any,
    accumulate: int = 1,
    sync_batch_norm: bool = False,
    op: Op = "exact",
    process_sets: tuple[tuple[int, ...], ...] = (),
    seed: int = 0,
) -> tuple[Any, ...]:
    """Collective. Make a model, its optimizer and the loaders of its training data ready for several ranks.

    The model and the optimizer are the same objects, with the primary's weights and state; what is saved of them has their
    own names. A model on a GPU moves to this rank's, which becomes the current device; batches are the script's own business.
    Random layers differ between ranks from here on.

    Args:
        loaders: ``DataLoader`` objects of training data, whose ``batch_size`` counts the samples of all ranks. A rank that
            has no sample in a small last batch gets one that counts for nothing. (Evaluate with ``shard``.)
        accumulate: backward passes of one update; its gradients are reduced once.
        sync_batch_norm: batch normalisation over all ranks' samples.
        op, process_sets: as in ``hvdtrain.Update``.
        seed: fixes the order of the samples and, with the rank, the random layers.

    Returns:
        model, optimizer and the loaders, in this order.

    Raises:
        UsageError: a loader cannot be divided, or the optimizer updates other parameters.
        HvdtrainError: the ranks disagree about the model or the data, or Horovod cannot be used.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate must be at least 1, got {accumulate}", "leave it out for an update after each backward()")
    script.done("hvdtrain.torch.prepare")
    check_optimizer(model, optimizer)
    update = Update(op=op, sync_batch_norm=sync_batch_norm, process_sets=process_sets)
    comm = _comm()
    samplers = [_sampler(loader, seed, fill=True) for loader in loaders]
    device = pick_device(comm.world)
    if any(parameter.is_cuda for parameter in model.parameters()):
        model.to(device)
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed((seed * 65_537 + comm.world.rank) % (1 << 32))
    if comm.world.size == 1:
        return model, optimizer, *(RankLoader(loader, sampler) for loader, sampler in zip(loaders, samplers, strict=True))
    _check_agreement(samplers, comm)
    consistency.check_shapes(torch_state.named_arrays(model, optimizer), comm, _hosts())
    for old, loop in list(_loops.items()):
        if loop.model is model:
            loop.close()
            del _loops[old]
    loop = _loops[optimizer] = Loop(model, optimizer, comm, update, accumulate, number=next(_numbers))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state = torch_state.broadcast(state, comm, loop.reducer.broadcast, device=next(model.parameters()).device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if not loaders:
        log.warning("prepare() got no loader: each of the %d ranks must read a part of the data of its own", comm.world.size)
    return (
        model,
        optimizer,
        *(RankLoader(loader, sampler, _announce) for loader, sampler in zip(loaders, samplers, strict=True)),
    )


def shard(loader: Any, *, seed: int = 0) -> RankLoader:
    """This rank's part of the batches of ``loader``, for evaluation: every sample once, so ranks may get unequal numbers.

    Add the ranks' sums and counts up with ``total``.
    """
    if size() > 1:
        script.expect("hvdtrain.torch.prepare", "each rank has trained a model of its own")
    return RankLoader(loader, _sampler(loader, seed, fill=False))


def total(*values: Any) -> tuple[float, ...]:
    """Collective. The sums over all ranks of numbers (or scalar tensors), the same on every rank."""
    return tuple(_comm().allreduce([float(value) for value in values], name="total").tolist())


def count(optimizer: torch.optim.Optimizer, units: Any) -> None:
    """Say before ``backward()`` what the loss is a mean over where that is not samples: tokens, or the sum of class weights."""
    if optimizer in _loops:
        _loops[optimizer].count(float(units))


def check(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective. Raise HvdtrainError, naming rank and tensor, if the ranks' weights or optimizer states differ.

    Moving statistics of batch normalisation that is not synchronised are averaged first.
    """
    if optimizer in _loops:
        if _loops[optimizer].update.process_sets:
            raise UsageError("check() compares all ranks, and process_sets train apart", "leave one of them out")
        _loops[optimizer].settle()
        consistency.check_values(torch_state.named_arrays(model, optimizer), _comm(), _hosts())


def rank() -> int:
    """This process's number, from 0."""
    return _comm().world.rank


def size() -> int:
    """The number of ranks."""
    return _comm().world.size


def is_primary() -> bool:
    """Whether this is rank 0, which prints and saves."""
    return _comm().world.is_primary


def _announce(loader: RankLoader, part: Slice, left: int) -> None:
    """Models that are trained side by side learn from the same batches."""
    for loop in _loops.values():
        loop.announce(loader, part, left)


def _comm() -> Communicator:
    return script.communicator("torch")


def _hosts() -> tuple[str, ...]:
    return script.hosts("torch")


def _sampler(loader: Any, seed: int, *, fill: bool) -> BatchSampler:
    return batch_sampler(loader, rank=rank(), size=size(), seed=seed, fill=fill)


def _check_agreement(samplers: list[BatchSampler], comm: Communicator) -> None:
    """Collective. Ranks that see other data would take another number of steps."""
    mine = [f"{sampler.order.num_samples} samples in batches of {sampler.order.batch_size}" for sampler in samplers]
    everyone = comm.allgather(mine, name="setup/data")
    for number, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise HvdtrainError(
                f"rank {number} on {_hosts()[number]} has {', '.join(theirs) or 'no loader'}; rank 0 has "
                f"{', '.join(everyone[0]) or 'none'}",
                "give every rank the whole data set: prepare() divides it",
            ).everywhere()
