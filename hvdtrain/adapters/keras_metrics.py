"""Figures of a Keras model: functions, and metrics that keep a state of their own, evaluated over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError


def check(metrics: Any) -> None:
    """Raise UsageError for what are no metrics by name."""
    hint = 'give them by name: metrics={"accuracy": keras.metrics.sparse_categorical_accuracy}'
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics must be a dict of functions or keras.metrics objects, got a {type(metrics).__name__}", hint)
    for name, figure in (metrics or {}).items():
        if not callable(figure):
            raise UsageError(f"the metric {name!r} must be a function of (targets, outputs), got {figure!r}", hint)


def reduced_result(name: str, metric: Any, comm: Communicator) -> dict[str, float]:
    """Collective. What ``metric`` gives on the samples of all ranks; the same names everywhere, on ranks without samples too."""
    mine = [(variable.aggregation, variable.value.numpy()) for variable in metric.variables]
    everyone = comm.allgather(mine, name=f"metrics/{name}")
    result = None
    if len(mine) == max(map(len, everyone)):  # some metrics make their variables when they see the first sample
        parts = [theirs for theirs in everyone if len(theirs) == len(mine)]
        for variable, column in zip(metric.variables, zip(*parts, strict=True), strict=True):
            arrays = [array for _, array in column]
            how = column[0][0]
            whole = arrays[0] if how == "only_first_replica" else sum(arrays[1:], arrays[0])
            variable.assign(whole / len(arrays) if how == "mean" else whole)
        result = _flat(name, metric.result())
    return next(found for found in comm.allgather(result, name=f"metrics/{name}/result") if found is not None)


def _flat(name: str, result: Any) -> dict[str, float]:
    if isinstance(result, Mapping):
        return {key: value for part in result for key, value in _flat(f"{name}/{part}", result[part]).items()}
    array = np.asarray(keras.ops.convert_to_numpy(result))
    if array.ndim == 0:
        return {name: float(array)}
    return {f"{name}/{number}": float(value) for number, value in enumerate(array.reshape(-1))}
