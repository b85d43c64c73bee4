"""Batches as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.adapters import batch_pair
from hvdtrain.comm.shared import ALIGN


class Batches:
    """Gives each batch to TensorFlow in the same tensors, whose memory it is copied into.

    To make a tensor takes 0.1 ms in the midst of training, as much as a small step has to spare. Traced steps begin with
    ``own``: what a model keeps of a batch would else be the next one.

    Args:
        on_host: whether that is where steps run. A GPU may still copy from the memory when the step has been called.
    """

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        #: by the place of an array in a batch: memory and the tensor that lies in it
        self._known: dict[int, tuple[NDArray[Any], Any]] = {}

    def tensors(self, batch: Any) -> tuple[Any, Any, int]:
        """Inputs, targets and the number of samples of ``batch``."""
        inputs, targets, count = batch_pair(batch)
        if isinstance(inputs, np.ndarray) and isinstance(targets, np.ndarray):
            return self._tensor(0, inputs), self._tensor(1, targets), count
        flat = [self._tensor(place, leaf) for place, leaf in enumerate(tf.nest.flatten((inputs, targets)))]
        return *tf.nest.pack_sequence_as((inputs, targets), flat), count

    def own(self, tensors: Any) -> Any:
        """In a traced step: the same in memory that is nobody else's (tf.identity gives the same memory)."""
        if not self._on_host:
            return tensors
        return tf.nest.map_structure(
            lambda tensor: tf.raw_ops.DeepCopy(x=tensor) if tensor.dtype.is_floating or tensor.dtype.is_integer else tensor,
            tensors,
        )

    def _tensor(self, place: int, leaf: Any) -> Any:
        if not (
            self._on_host and isinstance(leaf, np.ndarray) and leaf.size and leaf.dtype.kind in "fiu" and leaf.dtype.isnative
        ):
            return tf.convert_to_tensor(leaf)
        known = self._known.get(place)
        if known is None or known[0].shape != leaf.shape or known[0].dtype != leaf.dtype:
            known = self._known[place] = _memory(leaf)
        np.copyto(known[0], leaf)
        return known[1]


def fresh(batch: Any) -> tuple[Any, Any, int]:
    """Inputs, targets and the number of samples of ``batch``, in tensors of its own."""
    inputs, targets, count = batch_pair(batch)
    return *tf.nest.map_structure(tf.convert_to_tensor, (inputs, targets)), count


def _memory(like: NDArray[Any]) -> tuple[NDArray[Any], Any]:
    """For an array like that one, where TensorFlow takes memory over as it is; and a tensor there."""
    whole = np.empty(like.nbytes + ALIGN, np.uint8)
    start = -whole.ctypes.data % ALIGN
    array = whole[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
    return array, tf.experimental.dlpack.from_dlpack(array.__dlpack__())
