"""Learning rates as functions of the step: pure, so a resumed run continues where it was."""

from __future__ import annotations

import math
from collections.abc import Callable

#: learning rate of the update that follows ``step`` finished ones
Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """The same rate at every step."""
    return lambda step: lr


def cosine(lr: float, steps: int, *, floor: float = 0.0) -> Schedule:
    """From ``lr`` to ``floor`` along half a cosine over ``steps`` steps (Loshchilov and Hutter, arXiv 1608.03983)."""
    return lambda step: floor + (lr - floor) * 0.5 * (1 + math.cos(math.pi * min(step, steps) / max(steps, 1)))


def warmup(schedule: Schedule, steps: int) -> Schedule:
    """Rise linearly to ``schedule``'s own value over the first ``steps`` steps (Goyal et al., arXiv 1706.02677)."""
    return lambda step: schedule(step) * min(1.0, (step + 1) / steps) if steps > 0 else schedule(step)


def scale(rule: str, batch_size: int, base: int) -> float:
    """The factor on a learning rate that was chosen for ``base`` samples a batch and is used with ``batch_size``.

    "linear": Goyal et al., arXiv 1706.02677; "sqrt": Krizhevsky, arXiv 1404.5997; "none": 1.
    """
    return {"none": 1.0, "linear": batch_size / base, "sqrt": math.sqrt(batch_size / base)}[rule]


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """``factor`` times ``schedule``."""
    return lambda step: factor * schedule(step)
