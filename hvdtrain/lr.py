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
