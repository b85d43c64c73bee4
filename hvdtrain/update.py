"""How a batch becomes one update: the same words, and the same limits, in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hvdtrain.errors import UsageError

Precision = Literal["float32", "bfloat16", "float16"]
Op = Literal["exact", "average", "sum", "adasum"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an adapter does between a batch and the optimizer's own update.

    Attributes:
        precision: of the forward and the backward pass. Weights, sums over ranks and the update stay float32. float16
            scales the loss; an update whose gradients overflow is left out, on all ranks alike.
        micro_batch_size: most samples of one forward and backward pass on a rank; a larger part of a batch is done in
            pieces whose gradients add up before the one reduction. None: the whole part at once.
        clip_norm: largest global norm of the reduced gradients of all parameters together.
        clip_value: largest absolute value of a reduced gradient's elements.
        sync_batch_norm: batch normalisation over the global batch instead of each rank's part.
        count: what the loss is a mean over where that is not samples: a function of the targets, for example the number
            of tokens that are no padding, or the sum of class weights. It is reduced with the gradients.
        op: how gradients meet. "exact": the mean over the samples of the global batch, whatever each rank's part.
            "average" and "sum": of the ranks' own means, as Horovod's; "adasum": arXiv 2006.02924.
        prescale, postscale: factors on the gradients before and after their reduction.
        process_sets: the ranks that reduce with each other, as tuples that name each rank once; empty: all.

    Raises:
        UsageError: a value out of range, or two that exclude each other.
    """

    precision: Precision = "float32"
    micro_batch_size: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    sync_batch_norm: bool = False
    count: Callable[[Any], Any] | None = None
    op: Op = "exact"
    prescale: float = 1.0
    postscale: float = 1.0
    process_sets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}"
            for name, kind, value in (("precision", Precision, self.precision), ("op", Op, self.op))
            if value not in get_args(kind)
        ]
        for name in ("clip_norm", "clip_value", "prescale", "postscale"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                problems.append(f"{name} must be a positive number, got {value!r}")
        size: Any = self.micro_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            problems.append(f"micro_batch_size must be a positive whole number, got {size!r}")
        count: Any = self.count
        if count is not None and not callable(count):
            problems.append(f"count must be a function of the targets, got {count!r}")
        problems += [f"{first} and {second} exclude each other: {why}" for first, second, why in self._illegal_pairs()]
        if problems:
            raise UsageError(f"Update: {'; '.join(problems)}", "see the table of options in docs/training.md")

    def _illegal_pairs(self) -> list[tuple[str, str, str]]:
        op, pairs = f"op={self.op!r}", []
        if self.sync_batch_norm and self.micro_batch_size is not None:
            pairs.append(("sync_batch_norm", "micro_batch_size", "a micro-batch would be normalised by itself"))
        if self.clip_norm is not None and self.clip_value is not None:
            pairs.append(("clip_norm", "clip_value", "the result would depend on which comes first"))
        if self.count is not None and self.op != "exact":
            pairs.append(("count", op, "it weights the ranks' means, which this op does not"))
        if self.process_sets and self.op == "exact":
            pairs.append(("process_sets", op, "weights are parts of the global batch, which no set has; use 'average'"))
        if self.process_sets and self.sync_batch_norm:
            pairs.append(("process_sets", "sync_batch_norm", "it normalises over all ranks"))
        if self.op == "adasum" and self.process_sets:
            pairs.append(("process_sets", op, "Horovod has it for all ranks only"))
        if self.op == "adasum" and self.precision == "float16":
            pairs.append(("precision='float16'", op, "an overflow on one rank would not reach the others"))
        return pairs

    def check_size(self, size: int) -> None:
        """Raise UsageError if ``size`` ranks cannot reduce like this."""
        sets = self.sets(size)
        if sorted(rank for ranks in sets for rank in ranks) != list(range(size)):
            raise UsageError(
                f"process_sets must name each of the ranks 0..{size - 1} once, got {[list(ranks) for ranks in sets]}",
                f"for two halves: process_sets=({tuple(range(size // 2))}, {tuple(range(size // 2, size))})",
            )
        odd = next((len(ranks) for ranks in sets if len(ranks) & (len(ranks) - 1)), 0)
        if self.op == "adasum" and odd:
            power = 1 << (odd.bit_length() - 1)
            raise UsageError(
                f"op='adasum' needs a power of two of ranks, got {odd}", f"use -np {power} or {2 * power}, or op='average'"
            )

    def sets(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that reduce with each other, of ``size`` ranks."""
        return self.process_sets or (tuple(range(size)),)

    def peers(self, rank: int, size: int) -> int:
        """How many ranks ``rank`` reduces with, itself included."""
        return next((len(ranks) for ranks in self.sets(size) if rank in ranks), size)

    def factor(self, weight: float, size: int) -> float:
        """What a rank's mean gradient counts for in the sum over the ``size`` ranks that reduce with each other.

        ``weight`` is its part of the batch.
        """
        return self.prescale * {"exact": weight, "average": 1.0 / size, "sum": 1.0, "adasum": 1.0}[self.op]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
