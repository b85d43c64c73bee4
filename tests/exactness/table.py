"""Compare what the ranks of a job computed with what one process did, and print it as a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

#: relative to the largest value of each tensor; float32 sums in another order give a few 1e-7
FLOAT32 = 1e-5
#: Relative to the distance that the weights moved. A product of a micro-batch is rounded to 8 (bfloat16) or 11 (float16)
#: bits before the ranks' parts are added, so each part of a gradient carries half a unit of its last place, 2^-9 or 2^-12,
#: which the steps add up; float16 also rounds the scaled loss.
ROUNDING = {"bfloat16": 2.0**-6, "float16": 2.0**-8}


def load(out: Path, case: str, rank: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The state before and after."""
    with np.load(out / f"{case}-{rank}.npz") as saved:
        state = [saved[name] for name in saved.files]
    return state[: len(state) // 2], state[len(state) // 2 :]


def difference(job: Path, single: Path, case: str, way: str = "") -> tuple[float, float]:
    """The largest relative difference of a job's state from a single process's, and its bound.

    ``way``: how the job's gradients travelled, as the names of its files say.
    """
    before, after = load(single, case)
    _, found = load(job, case + way)
    bound = next((bound for name, bound in ROUNDING.items() if name in case), None)
    moved = max(float(np.abs(new.astype(float) - old).max()) for old, new in zip(before, after, strict=True))
    worst = 0.0
    for mine, wanted in zip(found, after, strict=True):
        scale = moved if bound else max(float(np.abs(wanted).max()), float(np.finfo(np.float32).tiny))
        worst = max(worst, float(np.abs(mine.astype(float) - wanted).max()) / scale)
    assert moved > 0, f"{case}: nothing was trained"
    return worst, bound or FLOAT32


def ranks_agree(job: Path, case: str, ranks: int) -> bool:
    """Whether all ranks hold the same, bit for bit."""
    first = load(job, case)[1]
    return all(np.array_equal(a, b) for rank in range(1, ranks) for a, b in zip(load(job, case, rank)[1], first, strict=True))
