"""Which layers make up each part of a model: the best cut into neighbours, or the user's.

A cut is a tuple of ``bounds``: part *i* has the layers ``bounds[i]`` to ``bounds[i + 1] - 1``, counted from 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError, shown

_BITS = 30  # of the sum of all costs where evenness is judged: its square, and twice the sentinel, must go into 63 bits
_NEVER = 1 << (2 * _BITS + 1)


def split(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """The bounds of ``parts`` parts of layers with ``costs``.

    The largest part is as small as can be; among such cuts, the sum of squares of the parts is least; then, earlier parts have more
    layers. The first is decided exactly, as fractions. Where nothing costs anything, all layers cost the same.

    Raises:
        UsageError: there are fewer layers than parts.
    """
    if parts < 1:
        raise ValueError(f"{parts} parts")
    wrong = next((layer for layer, cost in enumerate(costs) if not (math.isfinite(cost) and cost >= 0)), None)
    if wrong is not None:
        raise ValueError(f"the cost of layer {wrong} is {costs[wrong]}")
    if parts > len(costs):
        raise UsageError(
            f"{_count(len(costs), 'layer')} cannot be split into {parts} parts: each needs at least one",
            f"use --pipeline {len(costs)} at most" if costs else "",
        )
    exact = _integers(costs) if any(costs) else [1] * len(costs)
    sums = [0, *accumulate(exact)]
    return _most_even(exact, _reach(sums, _least_largest(sums, max(exact), parts)), parts)


def assign(costs: Sequence[float], stages: int, chunks: int = 1) -> tuple[int, ...]:
    """The bounds of the ``stages * chunks`` virtual stages.

    Raises:
        UsageError: there are fewer layers than virtual stages.
    """
    if chunks > 1 and stages * chunks > len(costs):
        raise UsageError(
            f"{_count(len(costs), 'layer')} cannot be split into {stages * chunks} virtual stages ({chunks} on each of {stages} "
            "ranks): each needs at least one",
            "use smaller --virtual-stages or --pipeline",
        )
    return split(costs, stages * chunks)


def by_hand(text: str, layers: int, parts: int) -> tuple[int, ...]:
    """The bounds that ``text`` gives, which has the number of layers of each part: "3,5,4".

    Raises:
        UsageError: it is no such text, or does not fit the number of ``layers`` or ``parts``.
    """
    words = [word.strip() for word in text.split(",")]
    # isdecimal alone takes the digits of other scripts, and int() no more than 4300 of them.
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0)]
    problems = []
    if len(words) != parts:
        problems.append(f"{_count(len(words), 'part')} where {parts} {'is' if parts == 1 else 'are'} needed")
    if wrong:
        listed = ", ".join(f"'{shown(word)}'" for word in wrong[:3])
        problems.append(f"{listed} {'is' if len(wrong) == 1 else 'are'} no number of layers (1 or more)")
    elif (total := sum(map(int, words))) != layers:
        problems.append(f"its layers add up to {total}, the model has {layers}")
    if problems:
        even = pairwise(split([1] * layers, parts)) if 1 <= parts <= layers else ()
        example = ",".join(str(high - low) for low, high in even)
        raise UsageError(f"--split {shown(text)}: {'; '.join(problems)}", f"for example --split {example}" if example else "")
    return (0, *accumulate(map(int, words)))


def _integers(costs: Sequence[float]) -> list[int]:
    """``costs`` times their common denominator, a power of two."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _least_largest(sums: Sequence[int], largest: int, parts: int) -> int:
    """The least limit under which ``parts`` parts can be filled, each as far as it goes: by bisection."""
    low, high = max(largest, -(-sums[-1] // parts)), sums[-1]
    while low < high:
        limit = (low + high) // 2
        end = 0
        for _ in range(parts):
            end = bisect_right(sums, sums[end] + limit) - 1
        low, high = (low, limit) if end == len(sums) - 1 else (limit + 1, high)
    return low


def _reach(sums: Sequence[int], limit: int) -> NDArray[np.int64]:
    """Of each layer, the last bound to which a part that begins there keeps to ``limit``."""
    return np.array([bisect_right(sums, begun + limit) - 1 for begun in sums], np.int64)


def _most_even(exact: Sequence[int], reach: NDArray[np.int64], parts: int) -> tuple[int, ...]:
    """By dynamic programming over the first layer of each part, from the last part to the first."""
    shift = max(0, sum(exact).bit_length() - _BITS)
    rounded = [(cost + (1 << shift >> 1)) >> shift for cost in exact]
    sums = np.array([0, *accumulate(rounded)], np.int64)
    layers = len(exact)
    bound = np.arange(layers + 1)
    squares = (sums[None, :] - sums[:, None]) ** 2
    squares[(bound[None, :] <= bound[:, None]) | (bound[None, :] > reach[:, None])] = _NEVER
    least = [np.where(bound == layers, 0, _NEVER)]  # [k][i]: the least sum of squares of the layers from i on in k parts
    sum_of = np.empty_like(squares)
    for _ in range(parts):
        np.add(squares, least[-1], out=sum_of)
        least.append(np.minimum(sum_of.min(axis=1), _NEVER))
    bounds = [0]
    for left in range(parts, 0, -1):
        begin = bounds[-1]
        bounds.append(int(np.flatnonzero(squares[begin] + least[left - 1] == least[left][begin])[-1]))
    return tuple(bounds)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
