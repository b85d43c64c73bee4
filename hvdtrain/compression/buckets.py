"""Buckets as flat arrays, and pieces of them that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.compression import Floats

#: elements of one piece: 128 KiB of float32
CHUNK = 32 * 1024


def flat(tensors: Sequence[Floats]) -> Floats:
    """The bucket that ``tensors`` are views of, as one writable array.

    Raises:
        ValueError: they do not lie one after the other in memory.
    """
    ends_at = tensors[0].ctypes.data
    for tensor in tensors:
        if tensor.dtype != np.float32 or not tensor.flags.c_contiguous or tensor.ctypes.data != ends_at:
            raise ValueError("a bucket's tensors must be float32 and lie one after the other in memory")
        ends_at += tensor.nbytes
    return np.lib.stride_tricks.as_strided(tensors[0].reshape(-1), (sum(tensor.size for tensor in tensors),), writeable=True)


def chunks(start: int, stop: int) -> Iterator[slice]:
    """``start`` to ``stop`` in pieces."""
    for first in range(start, stop, CHUNK):
        yield slice(first, min(first + CHUNK, stop))


def all_finite(array: Floats) -> bool:
    """Whether every element is finite."""
    whole = array.reshape(-1)
    return all(_finite(whole[piece]) for piece in chunks(0, whole.size))


def _finite(values: Floats) -> bool:
    # The sum of the squares takes half the time. It is not finite for values above 1e19 either.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())
