"""Which exchange is used, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, buckets, choose, refusal
from hvdtrain.update import Update
from hvdtrain.world import World

HOST = World(rank=1, size=4, local_rank=1, local_size=4, node_rank=0, num_nodes=1)
HOSTS = replace(HOST, local_size=2, num_nodes=2)
FINE = {"over_mpi": True, "on_host": True, "needed": 10 << 20, "room": 64 << 20}


@pytest.mark.parametrize(
    ("world", "update", "wanted", "facts", "why"),
    [
        (HOST, {}, {}, {}, ""),
        (HOSTS, {}, {}, {}, ""),
        (HOST, {}, {}, {"on_host": False}, "on a GPU"),
        (HOST, {}, {}, {"over_mpi": False}, "needs MPI"),
        (HOST, {}, {}, {"needed": 60 << 20}, "60 MB of shared memory are needed and /dev/shm has 64 MB free"),
        (HOST, {}, {}, {"room": None}, ""),
        (replace(HOST, elastic=True), {}, {}, {}, "may come and go"),
        (replace(HOSTS, local_rank=0, local_size=1), {}, {}, {}, "alone on its host"),
        (replace(HOSTS, local_size=3), {}, {}, {}, "different numbers of ranks"),
        (HOST, {"op": "adasum"}, {}, {}, "adasum"),
        (HOST, {"op": "sum", "process_sets": ((0, 1), (2, 3))}, {}, {}, "process_sets"),
        (HOST, {}, {"compression": "bfloat16"}, {}, "--compression bfloat16 goes with horovod"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(world, update, wanted, facts, why):
    found = refusal(world, Update(**update), Exchange(**wanted), **{**FINE, **facts})
    assert (why in found) if why else not found


def test_ranks_of_one_host_share_and_several_hosts_use_horovod_unless_asked():
    assert choose(Exchange(), ["", ""], HOST).engine == "shared"
    assert choose(Exchange(), ["", ""], HOSTS).engine == "horovod"
    assert choose(Exchange(engine="shared"), ["", ""], HOSTS).engine == "shared"
    assert choose(Exchange(engine="horovod"), ["", ""], HOST).engine == "horovod"


def test_one_rank_that_cannot_is_enough_for_all():
    choice = choose(Exchange(), ["", "the model is on a GPU"], HOST)
    assert (choice.engine, choice.reason) == ("horovod", "rank 1: the model is on a GPU")
    with pytest.raises(UsageError, match="shared is not possible: rank 1: the model is on a GPU"):
        choose(Exchange(engine="shared"), ["", "the model is on a GPU"], HOST)


def test_what_is_preferred_is_left_where_it_cannot_be():
    wanted = Exchange(engine="prefer-shared")
    assert choose(wanted, ["", ""], HOSTS).engine == "shared"
    choice = choose(wanted, ["/dev/shm is full"] * 2, HOSTS)
    assert (choice.engine, choice.reason) == ("horovod", "shared memory is preferred, but /dev/shm is full")


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 60))
def test_buckets_hold_neighbours_up_to_the_limit(sizes, limit):
    found = buckets(sizes, limit)
    assert [number for bucket in found for number in bucket] == list(range(len(sizes)))
    assert all(len(bucket) == 1 or sum(sizes[number] for number in bucket) <= limit for bucket in found)
