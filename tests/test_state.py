"""Where a run stands, in plain numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.state import TrainState


def test_a_step_moves_on_by_its_samples_and_an_epoch_starts_anew() -> None:
    state = TrainState().after(64).after(36)
    assert state == TrainState(step=2, epoch=0, position=100, samples=100)
    assert state.next_epoch().after(64) == TrainState(step=3, epoch=1, position=64, samples=164)


@given(st.builds(TrainState, *[st.integers(0, 10**13)] * 4))
def test_a_state_comes_back_from_json_as_it_was(state: TrainState) -> None:
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"step": 1},
        {"step": "x", "epoch": 0, "position": 0, "samples": 0},
        {"step": None, "epoch": 0, "position": 0, "samples": 0},
        [],
    ],
)
def test_a_foreign_file_is_refused(content: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        TrainState.from_json(content)


def test_what_a_later_version_adds_is_ignored() -> None:
    assert TrainState.from_json({**TrainState(3, 1, 7, 71).to_json(), "mood": "good"}) == TrainState(3, 1, 7, 71)
