"""What a pipeline refuses before anything is made."""

from __future__ import annotations

import pytest

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import UsageError
from hvdtrain.pipeline.wanted import Pipelining
from hvdtrain.world import World


def test_elastic_jobs_are_refused_with_one_stage_too() -> None:
    pytest.importorskip("torch")
    from tests.support import pipelines

    adapter = pipelines.torch().adapter
    with pytest.raises(UsageError, match="elastic job"):
        adapter.setup(LocalCommunicator(World(elastic=True)))


def test_a_split_that_is_no_word_and_no_list_is_refused() -> None:
    with pytest.raises(UsageError, match="--split evenly") as caught:
        Pipelining(split="evenly")
    assert "parameters, time, memory" in caught.value.hint


def test_micro_batches_have_one_number() -> None:
    assert [piece.stop - piece.start for piece in Pipelining(stages=2, micro_batches=4).micros(10, None)] == [2, 3, 2, 3]
    assert [piece.stop - piece.start for piece in Pipelining(stages=2).micros(10, 4)] == [4, 4, 2]
    assert Pipelining(stages=2).micros(0, None) == []
