"""What the user writes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.compression.choose import parse, refusal
from hvdtrain.errors import UsageError
from tests.support.links import ThreadLink, on_ranks


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("topk", "topk:0.01"),
        ("topk:0.001", "topk:0.001"),
        ("powersgd", "powersgd:4"),
        ("powersgd:2", "powersgd:2"),
    ],
)
def test_compressors_by_name(text, name):
    found = parse(text)
    assert found is not None
    assert found.name == name


def test_none_is_no_compressor():
    assert parse("none") is None
    assert parse("none", warmup=5) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gzip", "there is no 'gzip'"),
        ("", "there is no ''"),
        ("bfloat16:2", "there is no 'bfloat16:2'"),
        ("topk:", "the share must be"),
        ("topk:0", "the share must be"),
        ("topk:0.6", "at most 0.5, got '0.6'"),
        ("topk:nan", "got 'nan'"),
        ("powersgd:0", "the rank must be"),
        ("powersgd:1.5", "got '1.5'"),
        ("powersgd:²", "the rank must be"),
    ],
)
def test_what_cannot_be_read_is_told(text, told):
    with pytest.raises(UsageError) as error:
        parse(text)
    assert told in error.value.message
    assert error.value.hint


def test_a_negative_warmup_is_told():
    with pytest.raises(UsageError, match="--compression-warmup"):
        parse("topk", warmup=-1)


PLAIN = {"op": "exact", "precision": "float32", "process_sets": False, "sparse": False}


@pytest.mark.parametrize(
    ("text", "facts", "told"),
    [
        ("none", {"op": "adasum", "sparse": True}, ""),
        ("topk", {}, ""),
        ("bfloat16", {"precision": "float16"}, ""),
        ("powersgd", {"precision": "bfloat16"}, ""),
        ("topk", {"op": "adasum"}, "adasum"),
        ("bfloat16", {"process_sets": True}, "process_sets"),
        ("bfloat16", {"sparse": True}, "sparse"),
        ("float16", {"precision": "float16"}, "loss scale"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(text, facts, told):
    found = refusal(text, **PLAIN | facts)
    assert told in found
    assert bool(found) == bool(told)


def test_warmup_sums_exactly_at_first_and_remembers_how_far_it_came():
    def work(link: ThreadLink) -> list[int]:
        compressor, counts = parse("topk:0.1", warmup=3), []
        assert compressor is not None
        for step in range(5):
            if step == 2:  # as if resumed
                state = compressor.state()
                compressor = parse("topk:0.1", warmup=3)
                compressor.load(state, primary=link.rank == 0)
            bucket = np.ones(20, np.float32)
            compressor.exchange("b", [bucket], link)
            counts.append(np.count_nonzero(bucket))
        return counts

    assert on_ranks(2, work)[1][:3] == [20, 20, 20]
    assert all(count <= 4 for count in on_ranks(2, work)[0][3:])
