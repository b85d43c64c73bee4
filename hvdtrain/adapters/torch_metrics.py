"""Metrics that keep a state of their own: ``torchmetrics.Metric`` objects, evaluated over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError


def is_stateful(metric: Any) -> bool:
    """Whether ``metric`` has torchmetrics' interface (whose objects can be called like functions, too)."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset", "sync"))


def value(name: str, metric: Any, comm: Communicator) -> float:
    """Collective. The metric over the samples of all ranks, as torchmetrics merges states; it begins anew.

    Raises:
        UsageError: its value is no single number.
    """
    several = comm.world.size > 1
    if several:
        _fill_empty_lists(name, metric, comm)
    # What torchmetrics takes as arguments of a metric's constructor.
    metric.dist_sync_fn = lambda tensor, group=None: _gather(tensor, name, comm)
    metric.distributed_available_fn = lambda: several
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*before the .*update.* method")  # a rank without samples
        result = metric.compute()
    metric.reset()
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise UsageError(f"the metric {name!r} gives {type(result).__name__}, not one number", "for example average='macro'")
    return float(result)


def _fill_empty_lists(name: str, metric: Any, comm: Communicator) -> None:
    """Give a rank that saw no sample an empty tensor for each list that others filled: torchmetrics would gather nothing."""
    mine = {
        key: (tuple(state[0].shape[1:]), str(state[0].dtype).removeprefix("torch.")) if state else None
        for key, state in metric.metric_state.items()
        if isinstance(state, list)
    }
    if not mine:
        return
    for theirs in comm.allgather(mine, name=f"metrics/{name}/lists"):
        for key, shape in theirs.items():
            if shape is not None and not getattr(metric, key):
                setattr(metric, key, [torch.empty((0, *shape[0]), dtype=getattr(torch, shape[1]), device=metric.device)])


def _gather(tensor: torch.Tensor, name: str, comm: Communicator) -> list[torch.Tensor]:
    arrays = comm.allgather(tensor.detach().cpu().numpy(), name=f"metrics/{name}")
    return [torch.as_tensor(array, device=tensor.device) for array in arrays]
