"""Sums of numbers that travel in 16 bits and are added up in 32.

A reduce-scatter and an allgather, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005): each rank gets its slice of the bucket from all others, adds them up in float32, and sends the rounded sum to all.
So a value is rounded twice, whatever the number of ranks, and no sum is ever formed in 16 bits. Between two ranks, bfloat16 does
without slices: as many bytes, one round, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import CHUNK, all_finite, chunks, flat
from hvdtrain.compression.feedback import Residuals, forget_what_is_not_finite

Halves = NDArray[np.uint16]
#: The largest sum of a bucket is scaled to about 2**10, 64 times below the largest float16: a rank's own values may be larger
#: than their sum, and the next step's larger than this one's. The smallest ones then have 2**-34 of the largest.
_TARGET = 10
_LARGEST = np.float32(65504)
_INFINITE = 0x7C00


class Codec(Protocol):
    """A 16-bit format. Both methods take at most ``CHUNK`` elements."""

    def encode(self, values: Floats, out: Halves) -> None:
        """Round to nearest, ties to even. What is not finite stays so."""

    def decode(self, halves: Halves, out: Floats) -> None: ...


class Bfloat16Codec:
    """The upper half of float32: its range, 8 bits of precision."""

    def __init__(self) -> None:
        self._bits = np.empty(CHUNK, np.uint32)

    def encode(self, values: Floats, out: Halves) -> None:
        bits, whole = self._bits[: values.size], values.view(np.uint32)
        np.right_shift(whole, 16, out=bits)
        bits &= 1
        bits += 0x7FFF
        bits += whole
        np.right_shift(bits, 16, out=out, dtype=np.uint32, casting="unsafe")
        if not all_finite(values):
            out[np.isnan(values)] = 0x7FC0  # rounding carries over into the sign of some NaN and makes zeros of them

    def decode(self, halves: Halves, out: Floats) -> None:
        np.left_shift(halves, 16, out=out.view(np.uint32), dtype=np.uint32)


class Float16Codec:
    """float16 of the values times 2**``exponent``: 11 bits of precision, and a range that the scale has to meet."""

    def __init__(self, exponent: int) -> None:
        self._scale, self._unscale = np.float32(2.0**exponent), np.float32(2.0**-exponent)
        self._scaled = np.empty(CHUNK, np.float32)

    def encode(self, values: Floats, out: Halves) -> None:
        scaled = self._scaled[: values.size]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            np.multiply(values, self._scale, out=scaled)
            np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
            out.view(np.float16)[...] = scaled
        if not all_finite(values):
            out[~np.isfinite(values)] = _INFINITE

    def decode(self, halves: Halves, out: Floats) -> None:
        with np.errstate(invalid="ignore"):
            np.multiply(halves.view(np.float16), self._unscale, out=out, dtype=np.float32)


def sum_halves(bucket: Floats, link: Link, codec: Codec, owed: Floats | None) -> Halves:
    """Collective. Replace ``bucket`` by its sum over ranks, as ``codec`` carries it.

    Args:
        owed: gets what this rank's own values, and the sum of its slice, lost when they were rounded; None: that is lost.

    Returns:
        the sum as it travelled, in 16 bits: all of it, on every rank, with zeros after its end.
    """
    width = -(-bucket.size // link.size)
    parts = np.zeros(width * link.size, np.uint16)
    mine = slice(min(link.rank * width, bucket.size), min((link.rank + 1) * width, bucket.size))
    decoded = np.empty(CHUNK, np.float32)

    def send(piece: slice, out: Halves) -> None:
        codec.encode(bucket[piece], out)
        if owed is not None:
            lost = owed[piece]
            codec.decode(out, lost)
            with np.errstate(invalid="ignore"):
                np.subtract(bucket[piece], lost, out=lost)

    for others in (chunks(0, mine.start), chunks(mine.stop, bucket.size)):
        for piece in others:
            send(piece, parts[piece])
    got = link.alltoall(parts.reshape(link.size, width))
    sums = np.zeros(width, np.uint16)
    for piece in chunks(mine.start, mine.stop):
        inside = slice(piece.start - mine.start, piece.stop - mine.start)
        for rank in range(link.size):
            if rank != link.rank:
                values = decoded[: piece.stop - piece.start]
                codec.decode(got[rank, inside], values)
                with np.errstate(invalid="ignore"):
                    bucket[piece] += values
        send(piece, sums[inside])
    whole: Halves = link.allgather(sums).reshape(-1)
    for piece in chunks(0, bucket.size):
        codec.decode(whole[piece], bucket[piece])
    return whole


class Bfloat16:
    """Sums in bfloat16, half the bytes. No error feedback: each value is right to 2**-8 of itself, however small it is."""

    name = "bfloat16"

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        if link.size == 2:
            _add_up(flat(tensors), link)
        elif link.size > 2:
            sum_halves(flat(tensors), link, Bfloat16Codec(), None)

    def settle(self, link: Link) -> None:
        pass

    def state(self) -> State:
        return {}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        pass


def _add_up(bucket: Floats, link: Link) -> None:
    """Collective of two ranks: both get all that both have, as many bytes as in slices, but in one round and rounded once."""
    codec, halves = Bfloat16Codec(), np.empty(bucket.size, np.uint16)
    for piece in chunks(0, bucket.size):
        codec.encode(bucket[piece], halves[piece])
        codec.decode(halves[piece], bucket[piece])
    other = link.allgather(halves)[1 - link.rank]
    decoded = np.empty(CHUNK, np.float32)
    for piece in chunks(0, bucket.size):
        theirs = decoded[: piece.stop - piece.start]
        codec.decode(other[piece], theirs)
        with np.errstate(invalid="ignore", over="ignore"):
            bucket[piece] += theirs


class Float16:
    """Sums in float16, half the bytes, scaled by a power of two for each bucket, with error feedback.

    The scale follows from the largest sum of the step before, which all ranks know. What is too large or too small for it
    waits in the residual for the scale to follow.
    """

    name = "float16"

    def __init__(self) -> None:
        self._residuals = Residuals()
        self._exponents: dict[str, int] = {}

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        bucket = flat(tensors)
        owed = self._residuals.add_to(bucket, key)
        if link.size == 1:
            owed.fill(0)
            return
        if key not in self._exponents:
            largest = link.allgather(np.array([_largest(bucket)], np.float32))
            self._exponents[key] = _exponent(float(largest.sum()))
        exponent = self._exponents[key]
        halves = sum_halves(bucket, link, Float16Codec(exponent), owed)
        forget_what_is_not_finite(owed)
        top = _largest_half(halves)
        if np.isfinite(top):
            self._exponents[key] = _exponent(float(top) * 2.0**-exponent)
        if top in (0, _LARGEST):
            del self._exponents[key]  # how small, or how large, sums have become is not known: agree anew

    def settle(self, link: Link) -> None:
        self._residuals.settle(link)

    def state(self) -> State:
        scales = {f"exponent/{key}": np.array(exponent, np.int32) for key, exponent in self._exponents.items()}
        return self._residuals.state() | scales

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._residuals.load(state, primary=primary)
        self._exponents = {key[9:]: int(value) for key, value in state.items() if key.startswith("exponent/")}


def _exponent(largest: float) -> int:
    """The power of two that brings ``largest`` to 2**_TARGET or a little below; both it and its inverse are normal numbers."""
    return int(np.clip(_TARGET - np.frexp(largest)[1], -100, 100)) if 0 < largest < np.inf else 0


def _largest(bucket: Floats) -> float:
    """The largest absolute value of those that are finite."""
    found = 0.0
    for piece in chunks(0, bucket.size):
        values = bucket[piece]
        if not all_finite(values):
            values = values[np.isfinite(values)]
        if values.size:
            found = max(found, float(values.max()), -float(values.min()))
    return found


def _largest_half(halves: Halves) -> np.float16:
    """The largest absolute value, infinite if any element is not finite."""
    bits = max((int((halves[piece] & 0x7FFF).max()) for piece in chunks(0, halves.size)), default=0)
    found: np.float16 = np.uint16(min(bits, _INFINITE)).view(np.float16)
    return found
