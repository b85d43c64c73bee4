"""Figures are written four times a second, those of an evaluation at once; nothing is lost, and each keeps its own time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from hvdtrain.loggers import together
from hvdtrain.loggers.together import Together
from hvdtrain.state import TrainState


class Notes:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.times: list[float | None] = []
        self.closed = False

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        self.steps.append(state.step)
        self.times.append(at)

    def close(self) -> None:
        self.closed = True


def test_what_nothing_follows_is_written_all_the_same() -> None:
    notes = Notes()
    logger = Together([notes])
    logger.log(TrainState(7), {"train/loss": 1.0})
    until = time.monotonic() + 60
    while not notes.steps and time.monotonic() < until:
        time.sleep(0.01)
    assert notes.steps == [7]
    logger.close()


def test_what_waits_keeps_its_order_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_EVERY_S", 3600.0)
    first, second = Notes(), Notes()
    logger = Together([first, second])
    began = time.time()
    for step in range(6):
        logger.log(TrainState(step), {"train/loss": 1.0})
    ended = time.time()
    assert not first.steps
    logger.log(TrainState(5), {"valid/loss": 1.0})
    assert first.steps == second.steps == [0, 1, 2, 3, 4, 5, 5]
    assert first.times == sorted(first.times)
    assert all(began <= at <= ended for at in first.times[:-1])
    logger.close()


def test_what_comes_while_others_are_written_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_EVERY_S", 3600.0)
    notes = Notes()
    logger = Together([notes])

    class Slow:
        """Between the moment at which a line is begun and the one at which it waits, all that waits is written."""

        def time(self) -> float:
            logger._write()
            return 1.0

    monkeypatch.setattr(together, "time", Slow())
    for step in (1, 2, 3):
        logger.log(TrainState(step), {"train/loss": 1.0})
    logger.close()
    assert notes.steps == [1, 2, 3]


def test_the_end_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_EVERY_S", 3600.0)
    notes = Notes()
    logger = Together([notes])
    for step in (1, 2, 3):
        logger.log(TrainState(step), {"train/loss": 1.0})
    logger.close()
    assert notes.steps == [1, 2, 3]
    assert notes.closed
