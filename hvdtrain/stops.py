"""Requests to end a run in order: a signal, a time limit. They are met at a vote of the ranks, with a checkpoint."""

from __future__ import annotations

import os
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

#: The variable that says when ``hvdtrain run`` began, as ``time.time()`` counts: a restart does not lengthen ``--max-time``.
STARTED = "HVDTRAIN_STARTED"

#: What asks for it: a scheduler's pre-emption, ``kill``, ``scancel --signal=USR1``, ``hvdtrain run`` for its own.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


#: Signals that come together are one request: Slurm's reaches each process of a step, and the relay hands its own on.
_ONE_S = 2.0


class StoppedError(HvdtrainError):
    """The run was asked to end before its end; all ranks have agreed, and what was done is saved."""

    exit_code = EXIT_STOPPED


class StopNow(KeyboardInterrupt):
    """This rank was asked to end where nobody votes. No Exception: it comes anywhere, and nobody is to take it for his own."""

    exit_code = EXIT_STOPPED


class Stops:
    """Whether this rank was asked to end, and by what.

    Args:
        max_s: the run's time limit.
        since: when it began, as ``time.time()`` counts.
    """

    def __init__(self, max_s: float | None = None, since: float | None = None) -> None:
        left_s = None if max_s is None else max_s - (0.0 if since is None else time.time() - since)
        self._ends_at = None if left_s is None else time.monotonic() + left_s
        self._max_s = max_s
        self._signal, self._noted_at, self._is_met = "", 0.0, False

    @property
    def reason(self) -> str:
        """Empty as long as the run may go on."""
        if self._signal:
            return "on request" if self._signal == "SIGUSR1" else self._signal  # run sends it for its own signals
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return f"--max-time {self._max_s:g} s is over"
        return ""

    def met(self) -> None:
        """All is saved, or the training is over: signals change nothing any more."""
        self._is_met = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this is open, a first signal in training is noted. Elsewhere, and at a second SIGTERM, it raises StopNow."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread alone
            return
        before = {number: signal.signal(number, self._handler(os.getpid())) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the relay starts us with them waiting
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._is_met else handler)

    def _handler(self, process: int) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a copy of us, such as a loader's worker, is to die of it
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif not self._is_met:
                self._note(number)

        return note

    def _note(self, number: int) -> None:
        is_first, name = not self._signal, signal.Signals(number).name
        if is_first:
            self._signal, self._noted_at = name, time.monotonic()
        if not HERE.training:
            raise StopNow(f"stopped ({name}) in phase '{HERE.phase}'")
        if not is_first and number == signal.SIGTERM and time.monotonic() - self._noted_at > _ONE_S:
            raise StopNow(f"stopped ({name}, for the second time) without a new checkpoint")
