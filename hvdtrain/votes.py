"""How ranks agree to stop, or to meet anew: each brings what it knows to a reduction that takes place anyway; all follow the sum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hvdtrain.comm import Communicator
from hvdtrain.metrics import Mean, Means
from hvdtrain.stops import Stops

_REASONS, _REQUESTS, _CHANGES = "votes to stop", "requests to stop", "changes of hosts"
_FAILURES, _SECONDS = "checkpoints not written", "seconds a step"
_NAMES = (_REASONS, _REQUESTS, _CHANGES, _FAILURES, _SECONDS)

#: A request to stop is heard about this soon, or at the next step if steps are longer.
ASK_S = 1.0


class Votes:
    """The votes of one rank, and what all ranks decided.

    Args:
        stops: whether this rank was asked to end before the end.
        changes: whether this rank knows of hosts that came or went.
        failed: whether this rank knows of a checkpoint that could not be written.
    """

    def __init__(
        self,
        comm: Communicator,
        stops: Stops,
        changes: Callable[[], bool] = lambda: False,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._comm, self._stops, self._changes, self._failed = comm, stops, changes, failed
        self._mine: dict[str, None] = {}
        self.begin(comm, 0)
        #: why the training is over, as the ranks' callbacks decided
        self.over = ""

    def begin(self, comm: Communicator, step: int) -> None:
        """From ``step`` on these ranks vote. Requests are made anew: those who join do not know of them."""
        self._comm = comm
        self._at, self._step = time.monotonic(), step  # the last vote
        self._next = step
        #: what asks to stop before the training is over
        self.asked = ""
        #: whether the ranks are to meet again, as hosts came or went
        self.changed = False
        #: whether a checkpoint could not be written, which the rank that wrote it can tell
        self.failed = False

    def add(self, reasons: Iterable[str | None]) -> None:
        """Reasons of this rank to stop, until the next vote; once each, also where an interrupted evaluation is done again."""
        self._mine |= {str(reason): None for reason in reasons if reason}

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
            _CHANGES: Mean(float(self._changes()), 1),
            _FAILURES: Mean(float(self._failed()), 1),
            _SECONDS: waited,
        }

    def take(self, sums: Means, step: int) -> Means:
        """Collective if any rank voted. Read the reduced ``bring`` of all ranks; the other ``sums``."""
        if sums[_REASONS].total:
            self.over = self._gather("; ".join(self._mine))
        if sums[_REQUESTS].total:
            self.asked = self._gather(self._stops.reason)
        self.changed, self.failed = bool(sums[_CHANGES].total), bool(sums[_FAILURES].total)
        self._mine = {}
        seconds = sums[_SECONDS]
        self._next = step + (max(1, int(ASK_S / max(seconds.value, 1e-9))) if seconds.count else 1)
        return {name: mean for name, mean in sums.items() if name not in _NAMES}

    def _gather(self, mine: str) -> str:
        return "; ".join(dict.fromkeys(filter(None, self._comm.allgather(mine, name="stop/reasons"))))
