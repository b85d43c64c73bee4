"""Quick steps' figures are written together, everything else at once; nothing is lost, and each keeps its own time."""

from __future__ import annotations

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


class Time:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1000.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(together, "time", clock)
    return clock


def test_slow_steps_are_written_at_once(clock: Time) -> None:
    notes = Notes()
    logger = Together([notes])
    for step in (1, 2, 3):
        logger.log(TrainState(step), {"train/loss": 1.0})
        assert notes.steps[-1] == step
        clock.now += 0.25


def test_quick_steps_wait_and_keep_their_times(clock: Time) -> None:
    first, second = Notes(), Notes()
    logger = Together([first, second])
    for step in range(6):
        logger.log(TrainState(step), {"train/loss": 1.0})
        clock.now += 0.0625
    assert first.steps == second.steps == [0, 1, 2, 3, 4]
    assert first.times == [1100.0, 1100.0625, 1100.125, 1100.1875, 1100.25]


def test_an_evaluation_waits_for_nothing(clock: Time) -> None:
    notes = Notes()
    logger = Together([notes])
    for step in (1, 2):
        logger.log(TrainState(step), {"train/loss": 1.0})
    logger.log(TrainState(2), {"valid/loss": 1.0})
    assert notes.steps == [1, 2, 2]


def test_the_end_loses_nothing(clock: Time) -> None:
    notes = Notes()
    logger = Together([notes])
    for step in (1, 2, 3):
        logger.log(TrainState(step), {"train/loss": 1.0})
    logger.close()
    assert notes.steps == [1, 2, 3]
    assert notes.closed
