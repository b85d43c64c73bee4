"""Layers into parts: the best cut, and the user's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.pipeline.partition import assign, by_hand, split


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [high - low for low, high in pairwise(bounds)]


def _cuts(layers: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), parts - 1)]


def _sums(costs: Sequence[float], bounds: Sequence[int]) -> list[Fraction]:
    return [sum(map(Fraction, costs[low:high]), Fraction()) for low, high in pairwise(bounds)]


@st.composite
def _layers(draw: st.DrawFn, cost: st.SearchStrategy[float]) -> tuple[list[float], int]:
    costs = draw(st.lists(cost, min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(_layers(st.integers(0, 6) | st.sampled_from([0, 1, 100])))
@settings(max_examples=300, deadline=None)
def test_the_best_of_all_cuts_is_found(case: tuple[list[float], int]) -> None:
    """The least largest part, then the most even, then the one with more layers in earlier parts."""
    costs, parts = case
    judged = costs if any(costs) else [1] * len(costs)

    def merit(bounds: tuple[int, ...]) -> tuple[object, ...]:
        sums = _sums(judged, bounds)
        return max(sums), sum(each**2 for each in sums), tuple(-bound for bound in bounds)

    assert split(costs, parts) == min(_cuts(len(costs), parts), key=merit)


@given(_layers(st.floats(0, 1e12)))
@settings(max_examples=200, deadline=None)
def test_no_cut_has_a_smaller_largest_part_to_the_last_bit(case: tuple[list[float], int]) -> None:
    costs, parts = case
    bounds = split(costs, parts)
    assert bounds in _cuts(len(costs), parts)
    assert max(_sums(costs, bounds)) == min(max(_sums(costs, other)) for other in _cuts(len(costs), parts))


@pytest.mark.parametrize("cost", [1, 0.1, 1e9 / 3, 5e-324, 0])
def test_equal_layers_are_split_completely_and_evenly(cost: float) -> None:
    """R103: 10 layers on 3 ranks, and two of the layers were on none."""
    for layers, stages in itertools.product(range(1, 41), range(1, 9)):
        if stages <= layers:
            bounds = split([cost] * layers, stages)
            assert [layer for low, high in pairwise(bounds) for layer in range(low, high)] == list(range(layers))
            assert _sizes(bounds) == [len(part) for part in np.array_split(np.arange(layers), stages)]  # differ by 1 at most
        else:
            with pytest.raises(UsageError, match=rf"^{layers} layers? cannot be split into {stages} parts"):
                split([cost] * layers, stages)


def test_equal_parts_of_unequal_layers() -> None:
    assert split([6, 1, 2, 3, 3, 3], 3) == (0, 1, 4, 6)


def test_among_cuts_with_the_same_largest_part_the_most_even_is_taken() -> None:
    assert split([9, 1, 1, 1, 1, 1, 1], 3) == (0, 1, 4, 7)


def test_layers_without_cost_stay_with_what_comes_before() -> None:
    assert split([5, 0, 5, 0], 2) == (0, 2, 4)


def test_large_numbers_of_bytes_are_told_apart() -> None:
    assert split([2**40, 1, 2**40 - 2, 1], 2) == (0, 1, 4)


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [1.0, -1.0], [1.0, float("inf")]])
def test_costs_that_are_none_are_refused(costs: list[float]) -> None:
    with pytest.raises(ValueError, match="the cost of layer 1 is"):
        split(costs, 1)


@pytest.mark.parametrize("parts", [2, 64, 1000])
def test_a_thousand_layers_are_split_at_once(parts: int) -> None:
    random = np.random.default_rng(1)
    for costs in (random.random(1000), np.array([1e6, *random.random(999)])):
        began = time.process_time()
        bounds = split(costs.tolist(), min(parts, 64))
        assert time.process_time() - began < 2
        assert len(bounds) == min(parts, 64) + 1
        assert all(size > 0 for size in _sizes(bounds))


def test_numbers_of_numpy_are_taken() -> None:
    assert split(np.array([1, 1, 2], np.int64), 2) == split(np.array([1, 1, 2], np.float32), 2) == (0, 2, 3)


def test_virtual_stages_are_split_like_stages() -> None:
    assert assign([1] * 8, 2, 2) == (0, 2, 4, 6, 8)
    assert assign([1] * 8, 2) == (0, 4, 8)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "message", "hint"),
    [
        (3, 4, 1, "3 layers cannot be split into 4 parts", "use --pipeline 3 at most"),
        (1, 2, 1, "1 layer cannot be split into 2 parts", "use --pipeline 1 at most"),
        (0, 1, 1, "0 layers cannot be split into 1 parts", ""),
        (
            6,
            4,
            2,
            "6 layers cannot be split into 8 virtual stages (2 on each of 4 ranks)",
            "use smaller --virtual-stages or --pipeline",
        ),
    ],
)
def test_more_stages_than_layers_are_refused(layers: int, stages: int, chunks: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        assign([1] * layers, stages, chunks)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "layers", "bounds"), [("3,5,4", 12, (0, 3, 8, 12)), (" 1, 1 ,1", 3, (0, 1, 2, 3)), ("7", 7, (0, 7))]
)
def test_a_cut_by_hand(text: str, layers: int, bounds: tuple[int, ...]) -> None:
    assert by_hand(text, layers, len(bounds) - 1) == bounds


@pytest.mark.parametrize(
    ("text", "layers", "parts", "message", "hint"),
    [
        ("3,5,5", 12, 3, "--split 3,5,5: its layers add up to 13, the model has 12", "for example --split 4,4,4"),
        (
            "3,5",
            12,
            3,
            "--split 3,5: 2 parts where 3 are needed; its layers add up to 8, the model has 12",
            "for example --split 4,4,4",
        ),
        ("6,6", 12, 3, "--split 6,6: 2 parts where 3 are needed", "for example --split 4,4,4"),
        ("6,6", 12, 1, "--split 6,6: 2 parts where 1 is needed", "for example --split 12"),
        ("3,x,4", 12, 3, "--split 3,x,4: 'x' is no number of layers (1 or more)", "for example --split 4,4,4"),
        ("12,0", 12, 2, "--split 12,0: '0' is no number of layers (1 or more)", "for example --split 6,6"),
        ("14,-2", 12, 2, "--split 14,-2: '-2' is no number of layers (1 or more)", "for example --split 6,6"),
        (
            "6,6,",
            12,
            2,
            "--split 6,6,: 3 parts where 2 are needed; '' is no number of layers (1 or more)",
            "for example --split 6,6",
        ),
        ("a,²", 3, 2, "--split a,²: 'a', '²' are no number of layers (1 or more)", "for example --split 2,1"),
        ("1,1,1", 2, 3, "--split 1,1,1: its layers add up to 3, the model has 2", ""),
        (
            "9" * 5000,
            2,
            1,
            f"--split {'9' * 77}...: '{'9' * 77}...' is no number of layers (1 or more)",
            "for example --split 2",
        ),
    ],
)
def test_all_that_is_wrong_with_a_cut_by_hand_is_told(text: str, layers: int, parts: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        by_hand(text, layers, parts)
    assert (caught.value.message, caught.value.hint) == (message, hint)
