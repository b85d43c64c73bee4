"""Stopping when a figure gets no better."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.callbacks.early_stopping import EarlyStopping
from hvdtrain.errors import UsageError
from hvdtrain.state import TrainState


def _stops_at(values: list[float], **options: Any) -> int | None:
    """The evaluation, counted from 1, at which training stops."""
    stopping = EarlyStopping("valid/x", **options)
    for number, value in enumerate(values, 1):
        if stopping.on_evaluate(TrainState(), {"valid/x": value, "valid/other": 0.0}):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "stop"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 6], {"patience": 1}, 2),
        ([5, 5], {"patience": 1}, 2),
        ([5, 6, 6, 4, 5, 5, 5], {"patience": 3}, 7),
        ([5, 6, 6, 4, 5, 5], {"patience": 3}, None),
        ([5, 6, 5.5, 5.2], {"patience": 3}, 4),  # better than before is not better than the best
        ([1, 2, 3], {"patience": 1, "mode": "max"}, None),
        ([1, 0.9], {"patience": 1, "mode": "max"}, 2),
        ([-1, -2], {"patience": 1, "mode": "max"}, 2),
        ([5, 4.9, 4.8], {"patience": 2, "min_delta": 0.2}, 3),
        ([5, 4.7, 4.4], {"patience": 1, "min_delta": 0.2}, None),
        ([0.5, 0.6, 0.7], {"patience": 2, "min_delta": 0.5, "mode": "max"}, 3),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 5, math.nan, 4], {"patience": 2}, None),
        ([math.inf, math.inf], {"patience": 2}, 2),
    ],
)
def test_when_training_stops(values: list[float], options: dict[str, Any], stop: int | None) -> None:
    assert _stops_at(values, **options) == stop


def test_a_resumed_run_goes_on_counting_and_one_that_goes_on_after_its_end_waits_anew() -> None:
    first = EarlyStopping(patience=2, mode="max")
    for value in (1.0, 2.0, 2.0):
        assert first.on_evaluate(TrainState(), {"valid/loss": value}) is None
    state = json.loads(json.dumps(first.state_dict()))
    resumed = EarlyStopping(patience=2, mode="max")
    resumed.load_state_dict(state)
    assert resumed.on_evaluate(TrainState(), {"valid/loss": 2.0}) is not None
    again = EarlyStopping(patience=2, mode="max")
    again.load_state_dict(resumed.state_dict())
    assert again.on_evaluate(TrainState(), {"valid/loss": 2.0}) is None
    assert again.on_evaluate(TrainState(), {"valid/loss": 2.0}) is not None
    other = EarlyStopping("valid/accuracy", patience=2, mode="max")
    other.load_state_dict(state)  # of another figure
    assert other.best == math.inf


def test_the_reason_names_the_figure_and_how_long_it_waited() -> None:
    stopping = hvdtrain.EarlyStopping(patience=2)
    assert stopping.on_evaluate(TrainState(), {"valid/loss": 1.0}) is None
    assert stopping.on_evaluate(TrainState(), {"valid/loss": 1.0}) is None
    assert stopping.on_evaluate(TrainState(), {"valid/loss": 1.0}) == "valid/loss has not improved in 2 evaluations"


def test_a_figure_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="watches 'valid/acc', the evaluation gives valid/accuracy, valid/loss") as caught:
        EarlyStopping("valid/acc").on_evaluate(TrainState(), {"valid/loss": 1.0, "valid/accuracy": 0.5})
    assert caught.value.on_all_ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "least"}, "mode must be 'min' or 'max', got 'least'"), ({"patience": 0}, "at least 1, got 0")],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EarlyStopping(**options)


def test_a_callback_that_overrides_nothing_only_watches() -> None:
    callback = Callback()
    callback.on_start(TrainState())
    assert callback.on_step_end(TrainState()) is None
    assert callback.on_evaluate(TrainState(), {}) is None
    callback.on_end(TrainState())
