"""Requests to end a run in order: a signal, a time limit. They are met at a vote of the ranks, with a checkpoint."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE

#: What a scheduler is to start the job again for (EX_TEMPFAIL of sysexits.h).
EXIT_STOPPED = 75

#: What asks for it: a scheduler's pre-emption, ``kill``, ``scancel --signal=USR1``, ``hvdtrain run`` for its own.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


#: Signals that come together are one request: Slurm's reaches each process of a step, and the relay hands its own on.
_ONE_S = 2.0


class StoppedError(HvdtrainError):
    """The run was asked to end before its end; what was done is saved."""

    exit_code = EXIT_STOPPED


class Stops:
    """Whether this rank was asked to end, and by what."""

    def __init__(self, max_s: float | None = None) -> None:
        self._ends_at = None if max_s is None else time.monotonic() + max_s
        self._max_s = max_s
        self._signal, self._noted_at = "", 0.0
        self._asked: Callable[[], None] = lambda: None

    @property
    def reason(self) -> str:
        """Empty as long as the run may go on."""
        if self._signal:
            return self._signal
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return f"--max-time {self._max_s:g} s is over"
        return ""

    @contextmanager
    def listening(self, asked: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While this is open, the first signal is noted, and ``asked`` is called. Before training there is nothing to save: then,
        and at a second SIGTERM, the signal ends what the main thread is doing.
        """
        self._asked = asked
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread alone
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if HERE.step is None:
            raise StoppedError(f"stopped ({name}) before training began", "start the job again: nothing was lost")
        if not self._signal:
            self._signal, self._noted_at = name, time.monotonic()
            self._asked()
        elif number == signal.SIGTERM and time.monotonic() - self._noted_at > _ONE_S:
            raise StoppedError(f"stopped ({name}, for the second time) without a new checkpoint")


def seconds(text: str) -> float:
    """A duration: ``90``, ``90s``, ``30m``, ``2h``, ``1d``, ``1h30m``, or as Slurm writes it, ``1:30:00`` or ``1-12:00:00``.

    Raises:
        ValueError: it is none, or not positive.
    """
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
    text = text.strip().lower()
    if match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text):
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        total = float(days * 86400 + hours * 3600 + minutes * 60 + secs)
    elif text and re.fullmatch(r"(\d+(\.\d+)?[dhms])*(\d+(\.\d+)?)?", text):
        total = sum(float(value) * units[unit] for value, unit in re.findall(r"(\d+(?:\.\d+)?)([dhms]?)", text))
    else:
        raise ValueError(f"expected a time like 90s, 30m, 2h or 1:30:00, got {text!r}")
    if total <= 0:
        raise ValueError(f"must be more than 0, got {text!r}")
    return total
