"""How ranks agree to stop: each brings its own reasons to a reduction that takes place anyway, and all follow the sum."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hvdtrain.comm import Communicator
from hvdtrain.metrics import Mean, Means
from hvdtrain.stops import Stops

_REASONS, _REQUESTS, _SECONDS = "votes to stop", "requests to stop", "seconds a step"
NAMES = (_REASONS, _REQUESTS, _SECONDS)

#: A request to stop is heard about this soon, or at the next step if steps are longer.
ASK_S = 1.0


class Votes:
    """The votes of one rank, and what all ranks decided.

    Args:
        stops: whether this rank was asked to end before the end.
    """

    def __init__(self, comm: Communicator, stops: Stops) -> None:
        self._comm, self._stops = comm, stops
        self._mine: list[str] = []
        self._at, self._step = time.monotonic(), 0  # the last vote
        self._next = 0
        #: why the training is over, as the ranks' callbacks decided
        self.over = ""
        #: what asks to stop before the training is over
        self.asked = ""

    def add(self, reasons: Iterable[str | None]) -> None:
        """Reasons of this rank to stop, until the next vote."""
        self._mine += [str(reason) for reason in reasons if reason]

    def due(self, step: int) -> bool:
        """Whether a vote is due that no other reduction carries: the same on all ranks."""
        return step >= self._next

    def bring(self, step: int) -> Means:
        """What this rank adds to a reduction after ``step``."""
        now = time.monotonic()
        waited = Mean(now - self._at, max(step - self._step, 0))
        self._at, self._step = now, step
        return {
            _REASONS: Mean(float(len(self._mine)), 1),
            _REQUESTS: Mean(float(bool(self._stops.reason)), 1),
            _SECONDS: waited,
        }

    def take(self, sums: Means, step: int) -> None:
        """Collective if any rank voted. Read the reduced ``bring`` of all ranks; other names are left alone."""
        if sums[_REASONS].total:
            self.over = self._gather("; ".join(self._mine))
        if sums[_REQUESTS].total:
            self.asked = self._gather(self._stops.reason)
        self._mine = []
        seconds = sums[_SECONDS]
        self._next = step + (max(1, int(ASK_S / max(seconds.value, 1e-9))) if seconds.count else 1)

    def _gather(self, mine: str) -> str:
        return "; ".join(dict.fromkeys(filter(None, self._comm.allgather(mine, name="stop/reasons"))))
