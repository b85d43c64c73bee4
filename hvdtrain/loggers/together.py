"""Several loggers as one that keeps them out of the way of quick steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hvdtrain.loggers import Logger
from hvdtrain.state import TrainState

#: Figures of quick steps wait for each other so long: after one another they are written in a quarter of the time that each takes
#: between two steps.
_EVERY_S = 0.25


class Together:
    """Hands on to each of ``loggers`` what it is given, at once, or what came within a quarter of a second in one go.

    With what is told of an evaluation all is written, and at the end; a process that is killed loses that quarter of a second.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers
        self._waiting: list[tuple[TrainState, Mapping[str, float], float]] = []
        self._written = -_EVERY_S

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        self._waiting.append((state, values, time.time() if at is None else at))
        if time.monotonic() - self._written >= _EVERY_S or any(name.startswith("valid/") for name in values):
            self._write()

    def close(self) -> None:
        self._write()
        for logger in self._loggers:
            logger.close()

    def _write(self) -> None:
        waiting, self._waiting, self._written = self._waiting, [], time.monotonic()
        for logger in self._loggers:
            for state, values, at in waiting:
                logger.log(state, values, at)
