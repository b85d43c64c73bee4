"""Which step is the best."""

from __future__ import annotations

import math

import pytest

from hvdtrain.checkpoint.best import Best
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("watched", "values", "best"),
    [
        ("valid/loss:min", [3, 2, 2, 4], (2, 2)),
        ("valid/loss:max", [3, 2, 4, 4], (4, 3)),
        ("valid/loss:min", [math.nan, 5, -math.inf, 6], (5, 2)),
        ("valid/loss:max", [math.nan, math.inf], (None, 0)),
    ],
)
def test_the_first_of_the_best_is_the_best_and_what_is_no_number_never_is(watched, values, best):
    found = Best.parse(watched)
    for step, value in enumerate(values, 1):
        found = found.after(step, {"valid/loss": value})
    assert (found.value, found.step) == best


@pytest.mark.parametrize("text", ["", "valid/loss", "valid/loss:least", ":min", "min"])
def test_what_does_not_name_a_figure_and_a_mode_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="name of a validation figure and min or max") as caught:
        Best.parse(text)
    assert "--keep-best valid/accuracy:max" in caught.value.hint


def test_a_name_may_hold_colons():
    assert Best.parse("valid/f1:macro:max").figure == "valid/f1:macro"


def test_a_figure_that_the_evaluation_does_not_give_is_told_with_those_that_it_does():
    with pytest.raises(UsageError, match="watches 'valid/acc', the evaluation gives valid/accuracy, valid/loss"):
        Best.parse("valid/acc:max").after(1, {"valid/loss": 1.0, "valid/accuracy": 0.5})
