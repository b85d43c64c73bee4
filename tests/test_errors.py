"""Errors travel between ranks whole."""

from __future__ import annotations

import pickle

import pytest

from hvdtrain.errors import HvdtrainError, JobError, UsageError


@pytest.mark.parametrize("error", [HvdtrainError("a", "b"), UsageError("a").everywhere(), JobError("a", "b", exit_code=137)])
def test_an_error_is_the_same_after_a_journey(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.message, copy.hint, copy.exit_code, copy.on_all_ranks) == (
        error.message,
        error.hint,
        error.exit_code,
        error.on_all_ranks,
    )


def test_the_hint_stands_on_a_line_of_its_own():
    assert str(HvdtrainError("found this", "type that")) == "found this\nHint: type that"
    assert str(HvdtrainError("found this")) == "found this"
