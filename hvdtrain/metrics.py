"""Means that stay exact over steps and ranks: a total and a count, added up and divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A mean by name, as a step or an evaluation returns it. Every rank returns the same names, counts may be 0.
Means = dict[str, "Mean"]


@dataclass(frozen=True)
class Mean:
    """A sum over ``count`` samples. ``total`` may be a scalar tensor that stays on its device until it is read."""

    total: Any = 0.0
    count: float = 0

    @classmethod
    def of(cls, value: Any, count: float) -> Mean:
        """The mean ``value`` of ``count`` samples."""
        return cls(value * count if count else 0.0, count)

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN for no sample at all."""
        return float(self.total) / float(self.count) if self.count else math.nan


def merge(first: Mapping[str, Mean], second: Mapping[str, Mean]) -> Means:
    """Add two sets of means, name by name."""
    if first.keys() == second.keys():
        return {name: mean + second[name] for name, mean in first.items()}
    names = dict.fromkeys([*first, *second])
    return {name: first.get(name, Mean()) + second.get(name, Mean()) for name in names}


def reduce(means: Mapping[str, Mean], allreduce: Callable[[Sequence[float]], Sequence[float]]) -> Means:
    """Collective. Sum totals and counts over all ranks in one reduction; every rank must bring the same names."""
    names = sorted(means)
    numbers = [number for name in names for number in (float(means[name].total), float(means[name].count))]
    summed = allreduce(numbers)
    return {name: Mean(float(summed[2 * i]), float(summed[2 * i + 1])) for i, name in enumerate(names)}


def values(means: Mapping[str, Mean], prefix: str = "") -> dict[str, float]:
    """The plain numbers, for loggers and people."""
    return {prefix + name: mean.value for name, mean in means.items()}
