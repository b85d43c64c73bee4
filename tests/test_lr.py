"""Learning rates by the number of finished steps. They know no rank and no history, so nothing changes on resuming."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import lr


def test_warm_up_over_five_steps_to_a_constant() -> None:
    schedule = lr.warmup(lr.constant(0.4), 5)
    expected = [0.08, 0.16, 0.24, 0.32] + [0.4] * 17
    assert [schedule(step) for step in range(21)] == pytest.approx(expected)


@pytest.mark.parametrize("start", [3, 5, 12])
def test_a_resumed_run_sees_the_rates_of_an_uninterrupted_one(start: int) -> None:
    whole = lr.warmup(lr.cosine(0.4, 20), 5)
    rates = [whole(step) for step in range(21)]
    resumed = lr.warmup(lr.cosine(0.4, 20), 5)
    assert [resumed(step) for step in range(start, 21)] == rates[start:]


def test_cosine_goes_from_the_rate_to_the_floor_and_stays() -> None:
    schedule = lr.cosine(0.4, 20, floor=0.1)
    table = {0: 0.4, 5: 0.25 + 0.15 * math.sqrt(0.5), 10: 0.25, 15: 0.25 - 0.15 * math.sqrt(0.5), 20: 0.1, 21: 0.1, 1000: 0.1}
    assert {step: schedule(step) for step in table} == pytest.approx(table)


def test_warm_up_scales_the_schedule_below_it() -> None:
    below = lr.cosine(1.0, 10)
    assert [lr.warmup(below, 4)(step) for step in range(6)] == pytest.approx(
        [0.25 * below(0), 0.5 * below(1), 0.75 * below(2), below(3), below(4), below(5)]
    )


@pytest.mark.parametrize("steps", [0, -3])
def test_no_warm_up_leaves_the_schedule_as_it_is(steps: int) -> None:
    assert [lr.warmup(lr.constant(0.3), steps)(step) for step in (0, 1, 9)] == [0.3] * 3


@given(st.floats(1e-6, 10), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 2000))
def test_a_rate_is_never_outside_its_bounds(rate: float, steps: int, warm: int, step: int) -> None:
    assert 0 <= lr.warmup(lr.cosine(rate, steps), warm)(step) <= rate * (1 + 1e-9)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rules_for_larger_batches(rule, factor):
    assert lr.scale(rule, 256, 64) == factor
    assert lr.scale(rule, 64, 64) == 1.0
    schedule = lr.scaled(lr.warmup(lr.constant(0.1), 5), factor)
    assert [schedule(step) for step in (0, 4, 12)] == pytest.approx([0.02 * factor, 0.1 * factor, 0.1 * factor])
