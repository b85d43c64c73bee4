"""The files of a Keras model in a checkpoint: what ``model.load_weights`` reads, and the optimizer's variables."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

log = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model.weights.h5", "optimizer.npz"


def snapshot(model: Any, optimizer: Any, built_lr: float | None) -> Callable[[Path], None]:
    """Copy both to host memory; the function returned writes the copy.

    Keras writes what the variables hold when it writes. In a ``StatelessScope``, which is the thread's own, they hold the
    copy, while the training goes on with the variables themselves.
    """
    weights = [(variable, variable.value.numpy()) for variable in model.variables]
    states = [variable.value.numpy() for variable in optimizer.variables]

    def write(directory: Path) -> None:
        _refuse_full_disk(directory, [*(array for _, array in weights), *states])
        with tf.device("/CPU:0"), keras.StatelessScope(state_mapping=weights):
            model.save_weights(directory / MODEL)
        arrays: dict[str, Any] = {str(number): _plain(array) for number, array in enumerate(states)}
        if built_lr is not None:
            arrays["built_lr"] = np.array(built_lr)
        np.savez(directory / OPTIMIZER, **arrays)

    return write


def load(directory: Path, model: Any, optimizer: Any, built_lr: float | None) -> None:
    """Read what was written. A learning rate that the recipe gives otherwise than it did then is as it says now."""
    model.load_weights(directory / MODEL)
    with np.load(directory / OPTIMIZER, allow_pickle=False) as saved:
        then = float(saved["built_lr"]) if "built_lr" in saved else None
        count = len(saved) - (then is not None)
        if count != len(optimizer.variables):
            raise ValueError(f"{count} optimizer variables, the recipe's has {len(optimizer.variables)}")
        for number, variable in enumerate(optimizer.variables):
            variable.assign(saved[str(number)].view(variable.value.numpy().dtype))
    if built_lr is not None and then is not None and built_lr != then:
        log.warning("the optimizer goes on as the recipe says now: lr %g instead of %g", built_lr, then)
        optimizer.learning_rate = built_lr


def learning_rate(optimizer: Any) -> float | None:
    """The optimizer's learning rate; None for a schedule, which has no state of its own."""
    rates = [variable for variable in optimizer.variables if variable.name == "learning_rate"]
    return float(rates[0].value.numpy()) if rates else None


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """NumPy stores types that are not its own (bfloat16) only as bytes."""
    return array if array.dtype.kind in "biufc" else array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _refuse_full_disk(directory: Path, arrays: list[NDArray[Any]]) -> None:
    """HDF5 ends the whole process when the disk runs full under it (seen with h5py 3.14), so ask first."""
    needed = sum(array.nbytes + 4096 for array in arrays) + (1 << 16)
    if shutil.disk_usage(directory).free < needed:
        raise OSError(errno.ENOSPC, f"no space for {needed:,} bytes", str(directory))
