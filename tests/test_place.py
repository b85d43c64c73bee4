"""What hangs on a rank's place among how many."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdtrain import lr
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.config import Options
from hvdtrain.data.sources import as_source
from hvdtrain.errors import HvdtrainError
from hvdtrain.place import Place, step_seed
from hvdtrain.recipe import Recipe
from hvdtrain.state import TrainState
from hvdtrain.world import World
from tests.support import recipes


def place(rank: int = 0, size: int = 1, recipe: Recipe | None = None, **options: Any) -> Place:
    recipe = recipe or recipes.linear()
    return Place.of(recipe, as_source(recipe.train), None, Options(**options), World(rank, size))


class Ranks(LocalCommunicator):
    """Rank 0 of two that bring the same, but for what ``other`` changes."""

    other: Any = staticmethod(lambda value: value)

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        return [value, self.other(value)]


def test_random_layers_get_another_seed_at_each_step_and_rank_and_the_same_ones_again() -> None:
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(20) for rank in range(4)}
    assert len(seeds) == 240
    assert step_seed(1, 7, 2) == step_seed(1, 7, 2) == place(2, 4, seed=1).layers_seed(7)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_batch_size_per_rank_grows_with_the_ranks_and_the_rate_by_its_rule() -> None:
    recipe = replace(recipes.linear(), lr=lr.constant(0.5))
    made = place(1, 4, recipe, batch_size_per_rank=32, lr_scale="linear")
    assert (made.recipe.batch_size, made.sampler.batch_size, made.base_batch_size, made.lr_factor) == (128, 128, 64, 2.0)
    assert made.lr(3) == 1.0
    assert place().lr(3) == recipes.linear().lr


def test_rates_are_plain_numbers() -> None:
    assert type(place(recipe=replace(recipes.linear(), lr=lambda step: np.float32(0.5))).lr(0)) is float


def test_what_is_left_and_when_it_is_over() -> None:
    short, state = place(max_steps=20), TrainState(17, 1, 64, 1067)
    assert (place().total_steps(TrainState()), place().total_steps(state), short.total_steps(state)) == (32, 32, 20)
    assert [short.is_over(TrainState(step=step)) for step in (19, 20)] == [False, True]
    assert [place().is_over(TrainState(epoch=epoch)) for epoch in (1, 2)] == [False, True]
    end = place().advance(TrainState(15, 0, 960, 960), 43)
    assert end == TrainState(16, 1, 0, 1003)


def test_the_ranks_meet_with_their_hosts_and_unequal_shares() -> None:
    host = socket.gethostname()
    met = place(0, 2).meet(Ranks(World(0, 2)))
    assert (met.hosts, met.loader.share) == ((host, host), place(0, 2).loader.share)
    shared = place(1, 2, share=f"{host}=3").meet(Ranks(World(1, 2)))
    assert (shared.loader.share.before, shared.loader.share.own, shared.loader.share.total) == (3, 3, 6)


def test_ranks_that_are_set_up_otherwise_are_told_apart() -> None:
    comm = Ranks(World(0, 2))
    object.__setattr__(comm, "other", lambda value: {**value, "seed": 99, "samples": 12})
    with pytest.raises(
        HvdtrainError, match="rank 1 is set up otherwise than rank 0: samples 12 instead of 1003, seed 99"
    ) as caught:
        place(0, 2).meet(comm)
    assert caught.value.on_all_ranks
