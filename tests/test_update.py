"""What may be asked of an update, and what excludes each other."""

from __future__ import annotations

import pytest

from hvdtrain import Update
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "precision must be one of float32, bfloat16, float16"),
        ({"op": "mean"}, "op must be one of exact, average, sum, adasum"),
        ({"clip_norm": 0}, "clip_norm must be a positive number"),
        ({"clip_value": float("nan")}, "clip_value must be a positive number"),
        ({"prescale": "2"}, "prescale must be a positive number"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a positive whole number"),
        ({"micro_batch_size": True}, "micro_batch_size must be a positive whole number"),
        ({"count": 3}, "count must be a function"),
        ({"sync_batch_norm": True, "micro_batch_size": 8}, "sync_batch_norm and micro_batch_size exclude each other"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value exclude each other"),
        ({"count": len, "op": "average"}, "count and op='average' exclude each other"),
        ({"process_sets": ((0,), (1,))}, "process_sets and op='exact' exclude each other"),
        ({"precision": "float16", "op": "adasum"}, "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, message):
    with pytest.raises(UsageError, match=message):
        Update(**options)


def test_all_mistakes_come_together():
    with pytest.raises(UsageError, match=r"precision.*clip_norm.*micro_batch_size"):
        Update(precision="half", clip_norm=-1, micro_batch_size=0)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_adasum_takes_a_power_of_two_of_ranks(size):
    Update(op="adasum").check_size(size)


def test_adasum_on_three_ranks_names_what_would_work():
    with pytest.raises(UsageError, match="power of two of ranks, got 3") as caught:
        Update(op="adasum").check_size(3)
    assert caught.value.hint == "use -np 2 or 4, or op='average'"


@pytest.mark.parametrize("sets", [((0,), (2,)), ((0, 1), (1, 2)), ((0, 1, 2, 3),)])
def test_process_sets_name_each_rank_once(sets):
    with pytest.raises(UsageError, match=r"must name each of the ranks 0\.\.2 once"):
        Update(op="sum", process_sets=sets).check_size(3)


def test_factors_of_the_ranks_means():
    weights = (0.5, 0.25, 0.25, 0.0)
    assert [Update().factor(weight, 4) for weight in weights] == list(weights)
    assert [Update(op="average").factor(weight, 4) for weight in weights] == [0.25] * 4
    assert [Update(op="sum", prescale=2.0).factor(weight, 4) for weight in weights] == [2.0] * 4
