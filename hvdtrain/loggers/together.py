"""Several loggers as one that keeps them out of the way of the steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from hvdtrain.loggers import Logger
from hvdtrain.state import TrainState

#: How long figures wait for each other. One after the other they are written in a quarter of the time that each takes between two steps.
_EVERY_S = 0.25


class Together:
    """Hands on to each of ``loggers`` what it is given, in a thread, four times a second.

    What is told of an evaluation, and all before it, is written at once; so is the rest at the end. A process that is killed loses
    a quarter of a second.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers
        #: of both threads: what is added while another is taken out is the next
        self._waiting: deque[tuple[TrainState, Mapping[str, float], float]] = deque()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-loggers", daemon=True)
        self._thread.start()

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        self._waiting.append((state, values, time.time() if at is None else at))
        if any(name.startswith("valid/") for name in values):
            self._write()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._write()
        for logger in self._loggers:
            logger.close()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._write()

    def _write(self) -> None:
        with self._writing:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for logger in self._loggers:
                for state, values, at in waiting:
                    logger.log(state, values, at)
