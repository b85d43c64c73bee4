"""Where the time before the first step went."""

from __future__ import annotations

import pytest

from hvdtrain.progress import Progress
from hvdtrain.startup import Recorder, Startup, before_now, launch, process_age_s, summed


def test_phases_are_told_under_the_names_people_know_and_add_up() -> None:
    marks = [
        ("python", 10.0),
        ("importing the recipe", 10.5),
        ("building the recipe", 12.5),
        ("connecting the ranks", 13.5),
        ("setting up", 14.0),
        ("comparing the ranks' set-up", 14.25),
        ("nobody knows this one", 14.5),
        ("data loading", 14.75),
        ("training step", 14.76),
        ("over", 15.0),
    ]
    start = summed({"preparing": 0.5, "python": 0.5}, marks)
    assert start.phases == {
        "preparing": 0.5,
        "python": 1.0,
        "imports": 2.0,
        "recipe": 1.0,
        "connecting": 0.5,
        "set-up": 0.75,
        "first batch": pytest.approx(0.01),
        "first step": pytest.approx(0.24),
    }
    assert start.total_s == pytest.approx(6.0)
    assert start.text() == (
        "first step after 6.0 s: 0.5 preparing, 1.0 python, 2.0 imports, 1.0 recipe, 0.5 connecting, 0.8 set-up, 0.2 first step"
    )


def test_the_first_step_alone_is_told_and_once() -> None:
    told: list[Startup] = []
    here = Progress()
    here.begin()
    here.observer = Recorder(told.append, {}).entered
    for phase in ("building the recipe", "data loading", "training step"):
        here.enter(phase)
    assert told == []
    for phase in ("data loading", "training step", "data loading"):
        here.enter(phase)
    assert [list(start.phases) for start in told] == [["python", "recipe", "first batch", "first step"]]


def test_what_went_before_is_known_where_run_has_told_it() -> None:
    told = launch(100.0, 101.0)
    assert before_now(told, now=105.0, age_s=1.5) == {"preparing": 1.0, "launch": 2.5, "python": 1.5}
    assert before_now(told, now=101.0, age_s=1.5)["launch"] == 0.0  # another host's clock
    assert before_now("", now=105.0, age_s=1.5) == {"python": 1.5}
    assert before_now("x", now=105.0, age_s=1.5) == {"python": 1.5}


def test_a_process_knows_its_age() -> None:
    assert 0.0 < process_age_s() < 86_400.0
