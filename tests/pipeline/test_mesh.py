"""Ranks into pipelines."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.pipeline.mesh import Mesh


@pytest.mark.parametrize(
    ("hosts", "stages", "ranks"),
    [
        ("aaaa", 1, ((0,), (1,), (2,), (3,))),
        ("abab", 1, ((0,), (1,), (2,), (3,))),
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("aaaa", 4, ((0, 1, 2, 3),)),
        # one pipeline on each host
        ("aabb", 2, ((0, 1), (2, 3))),
        # ranks dealt out to the hosts in turn
        ("abab", 2, ((0, 2), (1, 3))),
        ("abcabcabc", 3, ((0, 3, 6), (1, 4, 7), (2, 5, 8))),
        # what is left on each host makes up a pipeline
        ("aaabbb", 2, ((0, 1), (2, 5), (3, 4))),
        ("aaaaabbbb", 3, ((0, 1, 2), (3, 4, 8), (5, 6, 7))),
        # the first host has too few ranks for a whole one
        ("abbb", 2, ((0, 3), (1, 2))),
        # no host has enough
        ("abcd", 4, ((0, 1, 2, 3),)),
        ("abcd", 2, ((0, 1), (2, 3))),
        ("abcabc", 3, ((0, 3, 1), (4, 2, 5))),
        ("aabb", 4, ((0, 1, 2, 3),)),
        ("abab", 4, ((0, 2, 1, 3),)),
    ],
)
def test_where_stages_are(hosts: str, stages: int, ranks: tuple[tuple[int, ...], ...]) -> None:
    assert Mesh.over(hosts, stages) == Mesh(stages, ranks)


def test_whom_a_rank_works_with() -> None:
    mesh = Mesh.over("aaabbb", 2)
    assert (mesh.stages, mesh.replicas) == (2, 3)
    assert [mesh.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (1, 1)]
    assert mesh.pipeline(5) == (2, 5)
    assert mesh.peers(5) == (1, 5, 4)
    assert mesh.sets == ((0, 2, 3), (1, 5, 4))


@given(st.integers(1, 8), st.integers(1, 8), st.data())
@settings(max_examples=150, deadline=None)
def test_every_rank_has_one_place_and_as_many_pipelines_as_can_be_are_on_one_host(
    stages: int, replicas: int, data: st.DataObject
) -> None:
    size = stages * replicas
    hosts = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    mesh = Mesh.over(hosts, stages)
    assert mesh.replicas == replicas
    assert sorted(rank for ranks in mesh.ranks for rank in ranks) == list(range(size))
    assert {len(ranks) for ranks in mesh.ranks} == {stages}
    assert mesh.place(0) == (0, 0)
    assert [ranks[0] for ranks in mesh.ranks] == sorted(ranks[0] for ranks in mesh.ranks)
    whole = sum(len({hosts[rank] for rank in ranks}) == 1 for ranks in mesh.ranks)
    assert whole >= sum(count // stages for count in Counter(hosts).values())
    for rank in range(size):
        replica, stage = mesh.place(rank)
        assert mesh.ranks[replica][stage] == mesh.pipeline(rank)[stage] == mesh.peers(rank)[replica] == rank
        assert mesh.peers(rank) == mesh.sets[stage]


@pytest.mark.parametrize(
    ("size", "stages", "message", "hint"),
    [
        (6, 4, "6 ranks cannot be divided into pipelines of 4 stages", "use -np 4 or -np 8, or other --pipeline"),
        (1, 2, "1 rank cannot be divided into pipelines of 2 stages", "use -np 2, or other --pipeline"),
        (0, 2, "0 ranks cannot be divided into pipelines of 2 stages", "use -np 2, or other --pipeline"),
        (2, 0, "a pipeline of 0 stages", "use --pipeline 1 or more"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused_on_each_alike(size: int, stages: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh.over("a" * size, stages)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.on_all_ranks
