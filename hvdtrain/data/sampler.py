"""Which samples make up a global batch, and which part of it is a rank's: pure functions of a few integers.

The order of an epoch is a pseudo-random permutation that is evaluated by index, so it takes no memory, any position
costs the same, and nothing depends on the number of ranks except who gets which part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 8  # enough for the smallest domains too; Luby and Rackoff need 4 for large ones
_MIN_BITS = 6  # a Feistel network over fewer bits reaches too few permutations
_CHUNK = 1 << 14  # positions evaluated at once: the work arrays stay in the cache


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of ``0..size-1``, keyed by ``(seed, epoch)``.

    An alternating Feistel network over the smallest power of two that holds ``size``, with cycle walking: a value
    outside the range is encrypted again until it falls inside (Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002). The round function is the finalizer of SplitMix64.
    """

    size: int
    seed: int = 0
    epoch: int = 0

    @cached_property
    def _keys(self) -> tuple[np.uint64, ...]:
        text = f"{self.seed}/{self.epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"hvdtrain-order").digest()
        return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    def __call__(self, positions: Indices) -> Indices:
        """The samples at ``positions`` (any shape, each in ``0..size-1``) of the order."""
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) < self.size):
            raise IndexError(f"positions must lie in 0..{self.size - 1}, got {int(flat.min())}..{int(flat.max())}")
        out = np.empty_like(flat)
        for start in range(0, flat.size, _CHUNK):
            out[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK].astype(np.uint64))
        return out.reshape(np.shape(positions))

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = max((self.size - 1).bit_length(), _MIN_BITS)
        # The fewer samples, the more values fall outside: small domains are encrypted once, as a table.
        table = self._encrypt(np.arange(1 << bits, dtype=np.uint64), bits) if bits == _MIN_BITS else None

        def encrypt(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
            return self._encrypt(values, bits) if table is None else table[values]

        values = encrypt(values)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values

    def _encrypt(self, values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        right_bits = np.uint64(bits // 2)
        masks = (np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1))
        halves = [values >> right_bits, values & masks[1]]
        for number, key in enumerate(self._keys):
            changed = number % 2
            halves[changed] ^= _mix(halves[1 - changed], key) & masks[changed]
        return (halves[0] << right_bits) | halves[1]


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = values ^ key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@dataclass(frozen=True)
class Share:
    """A rank's part of every batch: of ``total`` equal portions the ``own`` that follow the first ``before``."""

    before: int = 0
    own: int = 1
    total: int = 1

    @classmethod
    def equal(cls, rank: int, size: int) -> Share:
        """The share of ``rank`` where all have the same."""
        return cls(rank, 1, size)

    @classmethod
    def weighted(cls, rank: int, weights: Sequence[int]) -> Share:
        """The share of ``rank`` where rank *i* gets ``weights[i]`` portions."""
        return cls(sum(weights[:rank]), weights[rank], sum(weights))

    def of(self, count: int) -> tuple[int, int]:
        """The half-open range of ``count`` samples that is this share; equal shares differ by one sample at most."""
        return count * self.before // self.total, count * (self.before + self.own) // self.total


#: a single process's
WHOLE = Share()


@dataclass(frozen=True)
class Slice:
    """One global batch as one rank sees it."""

    #: samples of the epoch before this batch, and samples in the whole batch
    position: int
    global_count: int
    #: this rank's samples, in order; may be empty
    indices: Indices

    @property
    def weight(self) -> float:
        """This rank's part of the global batch: what its mean gradient counts for in the sum over ranks."""
        return len(self.indices) / self.global_count

    def __str__(self) -> str:
        """For messages: the first of this rank's samples."""
        shown = ", ".join(map(str, self.indices[:8].tolist()))
        return (
            f"samples {shown}{f' and {len(self.indices) - 8} more' if len(self.indices) > 8 else ''}" if shown else "no sample"
        )


@dataclass(frozen=True)
class Sampler:
    """Global batch *b* of an epoch is positions ``[b*batch_size, (b+1)*batch_size)`` of that epoch's order.

    The last batch of an epoch may be shorter; no sample is dropped, padded or repeated.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def count(self, position: int) -> int:
        """Samples in the global batch that starts at ``position``."""
        return min(self.batch_size, self.num_samples - position)

    def batch(self, epoch: int, position: int, share: Share = WHOLE) -> Slice:
        """The part ``share`` of the global batch that starts at ``position`` of ``epoch``."""
        count = self.count(position)
        low, high = share.of(count)
        return Slice(position, count, self._order(epoch, np.arange(position + low, position + high, dtype=np.int64)))

    def epoch(self, epoch: int, position: int = 0, share: Share = WHOLE) -> Iterator[Slice]:
        """The part ``share`` of every global batch of ``epoch`` from ``position`` on; what ``batch`` gives, computed in blocks."""
        low, high = share.of(self.batch_size)
        block = self.batch_size * max(1, _CHUNK // max(high - low, 1))
        while position + self.batch_size <= self.num_samples:
            end = min(position + block, position + (self.num_samples - position) // self.batch_size * self.batch_size)
            starts = np.arange(position, end, self.batch_size, dtype=np.int64)
            parts = self._order(epoch, starts[:, None] + np.arange(low, high, dtype=np.int64))
            for start, indices in zip(starts.tolist(), parts, strict=True):
                yield Slice(start, self.batch_size, indices)
            position = end
        if position < self.num_samples:
            yield self.batch(epoch, position, share)

    def _order(self, epoch: int, positions: Indices) -> Indices:
        return Permutation(self.num_samples, self.seed, epoch)(positions) if self.shuffle else positions
