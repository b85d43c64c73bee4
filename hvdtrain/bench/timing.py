"""How often something is done to know how long it takes; the same on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from hvdtrain.comm import Communicator

#: What is faster is done several times between two looks at the clock.
_TICK_S = 1e-3
FEWEST, MOST = 5, 200


def meet(comm: Communicator) -> None:
    """Collective. All ranks leave at about the same time."""
    comm.allreduce([0.0], name="bench/meet")


def slowest(comm: Communicator, seconds: Sequence[float]) -> list[float]:
    """Collective. Of each try, the time of the rank that took longest."""
    result: list[float] = comm.allreduce(seconds, name="bench/slowest", op="max").tolist()
    return result


def tries(comm: Communicator, action: Callable[[], object], *, budget_s: float) -> list[float]:
    """Collective. Seconds that ``action``, a collective, takes, each time until its slowest rank is done.

    It is done without being timed first, then until about ``budget_s`` have passed, 5 times at least. What takes less than a
    millisecond is timed several times at once.
    """

    def timed(times: int) -> float:
        meet(comm)
        started = time.perf_counter()
        for _ in range(times):
            action()
        return time.perf_counter() - started

    timed(1)
    once = slowest(comm, [timed(1)])[0]
    if once < _TICK_S:
        rough = math.ceil(_TICK_S / max(once, 1e-7))
        once = slowest(comm, [timed(rough) / rough])[0]
    times = max(1, math.ceil(_TICK_S / max(once, 1e-7)))
    count = min(MOST, max(FEWEST, int(budget_s / (once * times))))
    return slowest(comm, [timed(times) / times for _ in range(count)])
