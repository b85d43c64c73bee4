"""Unequal shares: every sample is somebody's, and hosts get what they were given."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.shares import host_shares
from hvdtrain.errors import UsageError

HOSTS = ("node1.example", "node1.example", "node2.example")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), st.integers(0, 10**6))
def test_shares_of_a_batch_cover_it_once_in_order(weights, count):
    parts = [Share.weighted(rank, weights).of(count) for rank in range(len(weights))]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(first[1] == second[0] for first, second in itertools.pairwise(parts))
    exact = [count * weight / sum(weights) for weight in weights]
    assert all(abs(high - low - wanted) < 1 for (low, high), wanted in zip(parts, exact, strict=True))


def test_an_epoch_in_unequal_shares_has_every_sample_once_in_the_same_batches():
    sampler = Sampler(1003, 64, seed=3)
    ranks = [list(sampler.epoch(1, 0, Share.weighted(rank, (3, 1, 0)))) for rank in range(3)]
    joined = [np.concatenate([part.indices for part in parts]).tolist() for parts in zip(*ranks, strict=True)]
    assert joined == [part.indices.tolist() for part in sampler.epoch(1)]
    assert sum(part.weight for part in (parts[0] for parts in ranks)) == pytest.approx(1)
    assert not any(len(part.indices) for part in ranks[2])


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("node1=2,node2=1", (2, 2, 1)),
        ("node2.example=3", (1, 1, 3)),
        (" node1 = 0 , node2=5", (0, 0, 5)),
    ],
)
def test_a_share_is_that_of_each_rank_on_the_host(text, shares):
    assert host_shares(text, HOSTS) == shares


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node3=2", "no rank is on 'node3'"),
        ("node1=x", "'node1=x' is no HOST=SHARE"),
        ("node1=-1", "'node1=-1' is no HOST=SHARE"),
        ("node1=²", "is no HOST=SHARE"),
        ("node1", "'node1' is no HOST=SHARE"),
        ("", "'' is no HOST=SHARE"),
        ("node1=1,node1.example=2", "'node1.example' is given twice"),
        ("node1=0,node2=0", "no host has a share above 0"),
    ],
)
def test_a_share_that_cannot_be_is_refused_with_the_hosts_there_are(text, problem):
    with pytest.raises(UsageError) as caught:
        host_shares(text, HOSTS)
    assert problem in caught.value.message
    assert caught.value.hint == "the hosts of this job: --share node1.example=1,node2.example=1"
