"""How fast a sum over ranks could be at most: what the memory, and the links between hosts, were seen to do."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.bench import timing
from hvdtrain.comm import Communicator

#: Below this size a sum takes as long as its messages need to get there: traffic is no measure of it.
LEAST_BYTES = 64 << 10
#: Long enough for ranks that share cores to get the same of them.
_STRETCH_S = 0.04
_STRETCHES = 5


def memory_s(comm: Communicator, size: int) -> tuple[float, float]:
    """Collective. The time that the memory traffic of a sum of ``size`` bytes takes by itself: in place, and as a copy.

    Each element of n arrays has to be read once, and its sum to be written into n arrays: n x ``size`` bytes are read and as many
    written, and each of the n ranks of a host does its share of that: it reads ``size`` bytes and writes ``size`` bytes. So all
    ranks do this at once, without meeting: they multiply an array of ``size`` bytes by 1 in place, which is the limit; and they
    copy it into another one, which takes more, as the memory that is written is read before.
    """
    array, other = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
    one = np.float32(1)
    in_place = _stretch(comm, lambda: np.multiply(array, one, out=array))
    return in_place, _stretch(comm, lambda: np.copyto(other, array))


def _stretch(comm: Communicator, action: Callable[[], object]) -> float:
    """Collective. Seconds of ``action``, done over and over by all ranks at once."""
    action()
    started = time.perf_counter()
    action()
    once = timing.slowest(comm, [time.perf_counter() - started])[0]
    times = max(1, math.ceil(_STRETCH_S / max(once, 1e-7)))
    seconds = []
    for _ in range(_STRETCHES):
        timing.meet(comm)
        started = time.perf_counter()
        for _ in range(times):
            action()
        seconds.append((time.perf_counter() - started) / times)
    return statistics.median(timing.slowest(comm, seconds))


def network_s(size: int, nodes: int, bytes_per_s: float) -> float:
    """Each of ``nodes`` hosts has to send and to receive 2 (nodes - 1) / nodes x ``size`` bytes over a link of this speed."""
    return 2 * (nodes - 1) / nodes * size / bytes_per_s
