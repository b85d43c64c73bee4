"""Means that are exact over steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import metrics
from hvdtrain.metrics import Mean, Means


def test_a_short_batch_counts_for_its_samples_only() -> None:
    assert (Mean.of(2.0, 3) + Mean.of(6.0, 1)).value == 3.0


def test_no_sample_has_no_mean_and_changes_none() -> None:
    assert math.isnan(Mean().value)
    assert math.isnan(Mean.of(math.nan, 0).value)
    assert (Mean.of(1.5, 4) + Mean.of(math.nan, 0)).value == 1.5


def test_a_mean_that_is_not_a_number_stays_visible() -> None:
    assert math.isnan((Mean.of(math.nan, 1) + Mean.of(1.0, 100)).value)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array])
def test_a_value_is_a_plain_float(kind: type) -> None:
    mean = Mean(kind(3.0), np.int64(2))
    assert type(mean.value) is float
    assert mean.value == 1.5


def test_totals_stay_where_they_are_until_they_are_read() -> None:
    class OnDevice:
        def __init__(self, number: float) -> None:
            self.number = number

        def __radd__(self, other: float) -> OnDevice:
            return OnDevice(self.number + other)

        def __add__(self, other: OnDevice) -> OnDevice:
            return OnDevice(self.number + other.number)

        def __float__(self) -> float:
            reads.append(self.number)
            return self.number

    reads: list[float] = []
    total: Means = {}
    for number in (1.0, 2.0, 3.0):
        total = metrics.merge(total, {"loss": Mean(OnDevice(number), 2)})
    assert reads == []
    assert total["loss"].value == 1.0
    assert reads == [6.0]


def test_merge_adds_by_name_and_keeps_what_only_one_side_has() -> None:
    merged = metrics.merge({"loss": Mean(4.0, 2), "old": Mean(1.0, 1)}, {"loss": Mean(2.0, 1), "new": Mean(5.0, 1)})
    assert merged == {"loss": Mean(6.0, 3), "old": Mean(1.0, 1), "new": Mean(5.0, 1)}


def _over_ranks(parts: Sequence[Means]) -> list[Means]:
    """What each rank gets: two passes, since each rank's numbers are known only after all have come."""
    sent: list[Sequence[float]] = []
    for part in parts:
        metrics.reduce(part, lambda numbers: sent.append(numbers) or numbers)  # type: ignore[func-returns-value]
    summed = np.sum(np.array(sent), axis=0)
    return [metrics.reduce(part, lambda numbers: summed) for part in parts]


@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=6), min_size=1, max_size=8))
def test_the_mean_over_ranks_is_that_of_all_samples(ranks: list[list[int]]) -> None:
    parts: list[Means] = [{"loss": Mean(float(sum(samples)), len(samples))} for samples in ranks]
    samples = [sample for part in ranks for sample in part]
    for reduced in _over_ranks(parts):
        assert reduced["loss"].count == len(samples)
        assert reduced["loss"].total == sum(samples)
        assert math.isnan(reduced["loss"].value) if not samples else reduced["loss"].value == sum(samples) / len(samples)


def test_two_samples_on_eight_ranks_count_as_two() -> None:
    parts: list[Means] = [{"hits": Mean.of(float(rank == 0), 1 if rank < 2 else 0)} for rank in range(8)]
    assert {reduced["hits"].value for reduced in _over_ranks(parts)} == {0.5}


def test_ranks_may_name_their_means_in_any_order() -> None:
    first, second = _over_ranks([{"a": Mean(1.0, 1), "b": Mean(10.0, 1)}, {"b": Mean(30.0, 1), "a": Mean(3.0, 1)}])
    assert first == second
    assert metrics.values(first) == {"a": 2.0, "b": 20.0}


def test_all_means_travel_in_one_reduction() -> None:
    calls: list[int] = []
    metrics.reduce({"a": Mean(1.0, 1), "b": Mean(2.0, 1)}, lambda numbers: calls.append(len(numbers)) or numbers)  # type: ignore[func-returns-value]
    assert calls == [4]


def test_values_are_named_for_loggers() -> None:
    assert metrics.values({"loss": Mean(3.0, 2)}, "valid/") == {"valid/loss": 1.5}
