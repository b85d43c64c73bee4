"""Gradients of matrices as products of two thin ones, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019
(arXiv 1905.13727): one step of subspace iteration, begun where the last step ended.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import CHUNK, all_finite, flat
from hvdtrain.compression.feedback import Residuals, forget_what_is_not_finite

DEFAULT_RANK = 4
_PREFIX = "basis/"


class PowerSgd:
    """Approximates the sum of a tensor of several dimensions by one of rank ``rank``; sends the others as they are.

    With M the matrix of a rank, its residual added, and Q [columns, rank] the same on all ranks: P = sum M Q, its columns made
    orthonormal; Q = sum M^T P; the sum of M is about P Q^T. A rank keeps M - P (M^T P)^T.

    All ranks get the same bits on hosts whose BLAS round differently too: P's columns are rank 0's, and P Q^T is no matrix product.
    """

    def __init__(self, rank: int = DEFAULT_RANK) -> None:
        self.name = f"powersgd:{rank}"
        self._rank = rank
        self._residuals = Residuals()
        self._bases: dict[str, Floats] = {}

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        bucket = flat(tensors)
        owed = self._residuals.of(key, bucket.size)
        shapes = [matrix_shape(tensor.shape, self._rank) for tensor in tensors]
        ends = np.cumsum([tensor.size for tensor in tensors])
        places = [slice(int(end) - tensor.size, int(end)) for end, tensor in zip(ends, tensors, strict=True)]
        plain = [bucket[place] for place, shape in zip(places, shapes, strict=True) if shape is None]
        matrices = [
            _Matrix(f"{key}/{index}", bucket[place].reshape(shape), owed[place].reshape(shape))
            for index, (place, shape) in enumerate(zip(places, shapes, strict=True))
            if shape is not None
        ]
        for matrix in matrices:
            matrix.own += matrix.owed
        if link.size == 1:
            owed.fill(0)
            return
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            lefts = _sum([*(matrix.own @ self._basis(matrix) for matrix in matrices), *plain], link)
            for gradient, total in zip(plain, lefts[len(matrices) :], strict=True):
                gradient[...] = total
            lefts = [_orthonormal(left) if link.rank == 0 else np.zeros_like(left) for left in lefts[: len(matrices)]]
            lefts = _sum(lefts, link)
            rights = [matrix.own.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                np.matmul(left, right.T, out=matrix.owed)
                np.subtract(matrix.own, matrix.owed, out=matrix.owed)
            forget_what_is_not_finite(owed)
            for matrix, left, right in zip(matrices, lefts, _sum(rights, link), strict=True):
                multiply(left, right, out=matrix.own)
                if all_finite(right):
                    self._bases[matrix.name] = right
                else:
                    self._bases.pop(matrix.name, None)  # begins anew

    def settle(self, link: Link) -> None:
        self._residuals.settle(link)

    def state(self) -> State:
        return self._residuals.state() | {_PREFIX + name: basis.copy() for name, basis in self._bases.items()}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._residuals.load(state, primary=primary)
        self._bases = {
            key.removeprefix(_PREFIX): np.array(value, np.float32) for key, value in state.items() if key.startswith(_PREFIX)
        }

    def _basis(self, matrix: _Matrix) -> Floats:
        """Where the last step's ended; for a new matrix a random one, the same on all ranks."""
        shape = matrix.own.shape[1], self._rank
        found = self._bases.get(matrix.name)
        if found is None or found.shape != shape:
            seed = zlib.crc32(matrix.name.encode())
            found = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return found


class _Matrix:
    """A tensor's part of a bucket and of its residual, as matrices."""

    def __init__(self, name: str, own: Floats, owed: Floats) -> None:
        self.name, self.own, self.owed = name, own, owed


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """A tensor's shape as a matrix, or None if two factors of ``rank`` columns are no smaller than it.

    The first dimension stands against the rest, as PyTorch's layers have their outputs first; or the last one does, as Keras'
    layers have them, if that makes smaller factors.
    """
    if len(shape) < 2:
        return None
    size = math.prod(shape)
    options = [(shape[0], size // max(shape[0], 1)), (size // max(shape[-1], 1), shape[-1])]
    rows, columns = min(options, key=sum)
    return (rows, columns) if (rows + columns) * rank < size else None


def multiply(left: Floats, right: Floats, out: Floats) -> None:
    """``left`` [rows, rank] times ``right`` [columns, rank], transposed: term by term, each rounded, as every processor does it."""
    width = max(1, CHUNK // max(1, len(right)))
    terms = [np.ascontiguousarray(column) for column in right.T]
    room = np.empty((width, len(right)), np.float32)
    for first in range(0, len(left), width):
        piece, rows = out[first : first + width], left[first : first + width]
        product = room[: len(piece)]
        np.multiply(rows[:, :1], terms[0], out=piece)
        for place in range(1, len(terms)):
            np.multiply(rows[:, place : place + 1], terms[place], out=product)
            piece += product


def _sum(arrays: Sequence[Floats], link: Link) -> list[Floats]:
    """Collective. The sums of all arrays, made in one go."""
    if not arrays:
        return []
    joined = np.concatenate([array.reshape(-1) for array in arrays])
    link.sum(joined)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(joined, ends), arrays, strict=True)]


def _orthonormal(matrix: Floats) -> Floats:
    """Columns of norm 1 at right angles that span those of ``matrix`` [rows, rank], rows >= rank; not finite if it is not."""
    if not all_finite(matrix):
        return np.full_like(matrix, np.nan)
    return np.linalg.qr(matrix)[0]
