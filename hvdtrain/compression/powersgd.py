"""Gradients of matrices as products of two thin ones, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019
(arXiv 1905.13727): one step of subspace iteration, begun where the last step ended.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import all_finite, flat
from hvdtrain.compression.feedback import Residuals

DEFAULT_RANK = 4
_PREFIX = "basis/"
#: elements of a product that are made at a time: 512 KiB of float64
_PIECE = 64 * 1024


class PowerSgd:
    """Approximates the sum of a tensor of several dimensions by one of rank ``rank``; sends the others as they are.

    With M the matrix of a rank, its residual added, and Q [columns, rank] the same on all ranks: P = sum M Q, its columns made
    orthonormal; Q = sum M^T P; the sum of M is about P Q^T. A rank keeps M - P (M^T P)^T.

    All ranks get the same bits on hosts whose BLAS round differently too: P's columns are rank 0's, and P Q^T is exact.

    Memory is what limits it. So M takes the residual's place, and P (M^T P)^T is taken off when the next step reads it.
    """

    def __init__(self, rank: int = DEFAULT_RANK) -> None:
        self.name = f"powersgd:{rank}"
        self._rank = rank
        self._residuals = Residuals()
        #: of each bucket, what its residual still has of what the last step sent
        self._sent: dict[str, list[_Sent]] = {}
        self._bases: dict[str, Floats] = {}

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        bucket = flat(tensors)
        owed = self._residuals.of(key, bucket.size)
        if link.size == 1:
            self._take_off(key)
            bucket += owed
            owed.fill(0)
            return
        shapes = [matrix_shape(tensor.shape, self._rank) for tensor in tensors]
        ends = np.cumsum([tensor.size for tensor in tensors])
        places = [slice(int(end) - tensor.size, int(end)) for end, tensor in zip(ends, tensors, strict=True)]
        plain = [bucket[place] for place, shape in zip(places, shapes, strict=True) if shape is None]
        matrices = [
            _Matrix(f"{key}/{index}", bucket[place].reshape(shape), owed[place].reshape(shape))
            for index, (place, shape) in enumerate(zip(places, shapes, strict=True))
            if shape is not None
        ]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            products = self._collect(key, matrices)
            try:
                self._send(key, matrices, products, plain, link)
            except BaseException:
                for matrix in matrices:  # the step may be done again
                    matrix.owed -= matrix.own
                raise

    def _collect(self, key: str, matrices: Sequence[_Matrix]) -> list[Floats]:
        """Add the gradients to what is owed, and return its products with the bases. In one pass over memory."""
        before = self._sent.get(key, [])
        if [sent.place for sent in before] != [_place(matrix.owed) for matrix in matrices]:
            self._take_off(key)
            before = []
        self._sent.pop(key, None)
        products = []
        for number, matrix in enumerate(matrices):
            basis, product = self._basis(matrix), np.empty((len(matrix.owed), self._rank), np.float32)
            room = _room(matrix.owed.shape)
            for rows in _pieces(matrix.owed.shape):
                if before:
                    before[number].take_off(rows, room)
                piece = matrix.owed[rows]
                piece += matrix.own[rows]
                np.matmul(piece, basis, out=product[rows])
            products.append(product)
        return products

    def _send(
        self, key: str, matrices: Sequence[_Matrix], products: Sequence[Floats], plain: Sequence[Floats], link: Link
    ) -> None:
        """Collective. Replace the gradients by what their sums over ranks are about."""
        sums = _sum([*products, *plain], link)
        lefts = [_orthonormal(left) if link.rank == 0 else np.zeros_like(left) for left in sums[: len(matrices)]]
        lefts = _sum(lefts, link)
        rights = [matrix.owed.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        totals = _sum(rights, link)
        self._sent[key] = [_Sent(each.owed, left, right) for each, left, right in zip(matrices, lefts, rights, strict=True)]
        for gradient, total in zip(plain, sums[len(matrices) :], strict=True):
            gradient[...] = total
        for matrix, left, right in zip(matrices, lefts, totals, strict=True):
            multiply(left, right, out=matrix.own)
            if all_finite(right):
                self._bases[matrix.name] = right
            else:
                self._bases.pop(matrix.name, None)  # begins anew

    def settle(self, link: Link) -> None:
        self._take_off_all()
        self._residuals.settle(link)

    def state(self) -> State:
        self._take_off_all()
        return self._residuals.state() | {_PREFIX + name: basis.copy() for name, basis in self._bases.items()}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._take_off_all()
        self._residuals.load(state, primary=primary)
        self._bases = {
            key.removeprefix(_PREFIX): np.array(value, np.float32) for key, value in state.items() if key.startswith(_PREFIX)
        }

    def _take_off(self, key: str) -> None:
        for sent in self._sent.pop(key, []):
            room = _room(sent.owed.shape)
            for rows in _pieces(sent.owed.shape):
                sent.take_off(rows, room)

    def _take_off_all(self) -> None:
        for key in list(self._sent):
            self._take_off(key)

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


class _Sent:
    """``left right^T`` of a residual: sent already. If that is not finite, the residual is forgotten instead."""

    def __init__(self, owed: Floats, left: Floats, right: Floats) -> None:
        self.owed, self.place = owed, _place(owed)
        self._left, self._right = left, np.ascontiguousarray(right.T)
        if not (all_finite(left) and all_finite(right)):
            owed.fill(0)
            self._left, self._right = np.zeros_like(left), np.zeros_like(self._right)

    def take_off(self, rows: slice, room: Floats) -> None:
        piece = self.owed[rows]
        piece -= np.matmul(self._left[rows], self._right, out=room[: piece.size].reshape(piece.shape))


def _place(owed: Floats) -> tuple[int, tuple[int, ...]]:
    return owed.ctypes.data, owed.shape


def _pieces(shape: Sequence[int]) -> Iterator[slice]:
    """The rows of a matrix in pieces that stay in a core's cache."""
    rows, columns = shape
    width = max(1, _PIECE // max(1, columns))
    for first in range(0, rows, width):
        yield slice(first, min(first + width, rows))


def _room(shape: Sequence[int], dtype: Any = np.float32) -> NDArray[Any]:
    """For one of ``_pieces``: memory that is asked for anew each time would come from the kernel."""
    return np.empty(max(_PIECE, shape[1]), dtype)


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
    """``left`` [rows, rank] times ``right`` [columns, rank], transposed: the same bits on every processor.

    Both are taken as whole numbers of a unit, so small that sums of their products are exact in float64, whatever the order.
    """
    bits = (53 - (left.shape[1] - 1).bit_length()) // 2
    lefts, rights = _whole(left, bits), np.ascontiguousarray(_whole(right, bits).T)
    room = _room(out.shape, np.float64)
    for rows in _pieces(out.shape):
        piece = out[rows]
        piece[...] = np.matmul(lefts[rows], rights, out=room[: piece.size].reshape(piece.shape))


def _whole(values: Floats, bits: int) -> NDArray[np.float64]:
    """``values`` as multiples of 2**-bits of the power of two above the largest of them."""
    exact = values.astype(np.float64)
    largest = float(np.abs(exact).max(initial=0))
    if not 0 < largest < np.inf:
        return exact
    unit = 2.0 ** (np.frexp(largest)[1] - bits)
    exact /= unit
    np.rint(exact, out=exact)
    exact *= unit
    return exact


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
