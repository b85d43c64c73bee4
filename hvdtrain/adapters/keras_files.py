"""The files of a Keras model in a checkpoint: what ``model.load_weights`` reads, the optimizer's variables, and what an exchange
of compressed gradients remembers, if there is one."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, EXCHANGE = "model.weights.h5", "optimizer.npz", "exchange.npz"


class HostCopy:
    """Copies model and optimizer to host memory, each time to the same: fresh memory takes several times as long as the copy."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []

    def take(self, model: Any, optimizer: Any, built_lr: float | None, remembered: Mapping[str, Any]) -> Callable[[Path], None]:
        """Both as they are now; the function returned writes them and ``remembered``, until the next call.

        Keras writes what the variables hold when it writes. In a ``StatelessScope``, which is the thread's own, they hold
        the copy, while the training goes on with the variables themselves.
        """
        variables = [*model.variables, *optimizer.variables]
        values = [np.asarray(variable.value.read_value()) for variable in variables]  # in host memory: the variable's own
        if [(array.shape, array.dtype) for array in values] != [(array.shape, array.dtype) for array in self._arrays]:
            self._arrays = [np.empty_like(array) for array in values]
        for array, value in zip(self._arrays, values, strict=True):
            np.copyto(array, value)
        kind = _kind(optimizer)
        count, arrays = len(model.variables), list(self._arrays)
        weights, states = list(zip(variables[:count], arrays[:count], strict=True)), arrays[count:]

        def write(directory: Path) -> None:
            _refuse_full_disk(directory, [*arrays, *remembered.values()])
            with tf.device("/CPU:0"), keras.StatelessScope(state_mapping=weights):
                model.save_weights(directory / MODEL)
            plain: dict[str, Any] = {str(number): _plain(array) for number, array in enumerate(states)}
            plain["class"] = np.array(kind)
            if built_lr is not None:
                plain["built_lr"] = np.array(built_lr)
            np.savez(directory / OPTIMIZER, **plain)
            if remembered:
                np.savez(directory / EXCHANGE, **remembered)

        return write


def load(directory: Path, model: Any, optimizer: Any, built_lr: float | None) -> dict[str, NDArray[Any]]:
    """Read what was written. A learning rate that the recipe gives otherwise than it did then is as it says now.

    Returns:
        what was ``remembered``.

    Raises:
        ValueError: it does not fit the model or the optimizer.
    """
    with np.load(directory / OPTIMIZER, allow_pickle=False) as saved:
        then = float(saved["built_lr"]) if "built_lr" in saved else None
        kind = str(saved["class"]) if "class" in saved else _kind(optimizer)  # earlier versions did not say
        if kind != _kind(optimizer):
            raise ValueError(f"it holds the state of the optimizer {kind}, the recipe's is {_kind(optimizer)}")
        count = sum(name.isdecimal() for name in saved)
        if count != len(optimizer.variables):
            raise ValueError(f"{count} optimizer variables, the recipe's has {len(optimizer.variables)}")
        model.load_weights(directory / MODEL)
        for number, variable in enumerate(optimizer.variables):
            array, own = saved[str(number)], variable.value.numpy().dtype
            if array.dtype != _plain(np.empty(0, own)).dtype:
                raise ValueError(f"the optimizer's {variable.path} was saved as {array.dtype}, the recipe's is {own}")
            variable.assign(array if array.dtype == own else array.view(own))
    prefer_recipe(optimizer, then, built_lr)
    if not (directory / EXCHANGE).exists():
        return {}
    with np.load(directory / EXCHANGE, allow_pickle=False) as saved:
        return dict(saved.items())


def prefer_recipe(optimizer: Any, then: float | None, built_lr: float | None) -> None:
    """Of a loaded optimizer: a learning rate that the recipe gives otherwise than it did ``then`` is as it says now."""
    if built_lr is not None and then is not None and built_lr != then:
        log.warning("the optimizer goes on as the recipe says now: lr %g instead of %g", built_lr, then)
        optimizer.learning_rate = built_lr


def learning_rate(optimizer: Any) -> float | None:
    """The optimizer's learning rate; None for a schedule, which has no state of its own."""
    rates = [variable for variable in optimizer.variables if variable.name == "learning_rate"]
    return float(rates[0].value.numpy()) if rates else None


def _kind(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    return type(optimizer).__name__ + (f" of {_kind(inner)}" if inner is not None else "")


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """NumPy stores types that are not its own (bfloat16) only as bytes."""
    return array if array.dtype.kind in "biufc" else array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _refuse_full_disk(directory: Path, arrays: list[NDArray[Any]]) -> None:
    """HDF5 ends the whole process when the disk runs full under it (seen with h5py 3.14), so ask first."""
    needed = sum(array.nbytes + 4096 for array in arrays) + (1 << 16)
    if shutil.disk_usage(directory).free < needed:
        raise OSError(errno.ENOSPC, f"no space for {needed:,} bytes", str(directory))
