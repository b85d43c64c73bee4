"""Who else wants the processors that a measurement is to have."""

from __future__ import annotations

import pytest

from hvdtrain.bench import crowd

BEFORE = {"user": 10.0, "guest": 1.0, "system": 5.0, "idle": 100.0, "iowait": 1.0, "steal": 0.0}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"idle": 101.0}, 0.0),
        ({"idle": 100.5, "iowait": 1.5}, 0.0),
        ({"idle": 100.5, "user": 10.5, "guest": 1.5}, 0.5),
        ({"steal": 0.25, "idle": 100.75}, 0.25),
        ({}, 0.0),
    ],
)
def test_the_part_of_the_time_that_is_used(change: dict[str, float], part: float) -> None:
    assert crowd.used(BEFORE, BEFORE | change) == pytest.approx(part)


def test_a_machine_that_is_quiet_and_has_room_needs_no_word() -> None:
    assert crowd.warnings(2, 2, 0.15) == []


def test_other_programs_and_too_many_ranks_are_told() -> None:
    busy, many = crowd.warnings(4, 2, 0.63)
    assert busy.startswith("other programs use 63% of this machine's processors: times come out longer")
    assert many.startswith("4 ranks take turns on 2 processors here")


def test_the_look_at_this_machine_is_a_part() -> None:
    assert 0 <= crowd.busy(0.05) <= 1
