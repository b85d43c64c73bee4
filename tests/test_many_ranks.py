"""What a rank says and writes does not grow with the number of ranks, but for a few bytes of each at the set-up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.common.simulated import BY_TIME, SIZES, STEPS, Call, Seen, growth, model_s, rounds, train
from hvdtrain.data.sampler import Sampler, Share

MOST = SIZES[-1]
#: The collectives whose bytes grow with the ranks: who they are and whether they agree, when they meet.
OF_EACH_RANK = {"hosts", "setup/hosts", "setup/agreement"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Seen]:
    """By the number of ranks, and the rank."""
    pairs = [(2, 0), (2, 1), (MOST, 0), (MOST, MOST - 1)]
    return {pair: train(*pair, tmp_path_factory.mktemp("run")) for pair in pairs}


def test_nothing_but_the_set_up_carries_bytes_of_every_rank(seen):
    few, many = ({call.name: call.got for call in seen[pair].calls} for pair in ((2, 1), (MOST, MOST - 1)))
    assert {name for name in many if growth({2: few[name], MOST: many[name]}) != "flat"} == OF_EACH_RANK
    assert {call.name for call in seen[MOST, 0].calls if call.kind == "allgather"} == OF_EACH_RANK
    assert all(len(seen[MOST, 0].of(name)) == 1 for name in OF_EACH_RANK)
    assert max(many[name] for name in OF_EACH_RANK) < 4 << 20


def test_there_are_as_many_collectives_at_any_number_of_ranks(seen):
    counts = [Counter(call.name for call in each.calls if call.name not in BY_TIME) for each in seen.values()]
    assert all(count == counts[0] for count in counts)
    assert counts[0]["gradient"] == STEPS
    assert counts[0]["metrics/train"] == STEPS // 10
    assert counts[0]["metrics/valid"] == counts[0]["consistency/digest"] == STEPS // 20


def test_the_primary_alone_writes_and_as_much_at_any_number_of_ranks(seen):
    assert seen[2, 1].files == seen[MOST, MOST - 1].files == {}
    assert seen[MOST, 0].files.keys() == seen[2, 0].files.keys()
    for below in ("checkpoints", "metrics.jsonl"):
        assert growth({size: seen[size, 0].bytes_below(below) for size in (2, MOST)}, tolerance=1.1) == "flat"


def test_a_rank_of_thousands_computes_its_own_samples_alone(monkeypatch):
    asked = []
    plain = Sampler._order

    def order(self: Sampler, epoch: int, positions: np.ndarray) -> np.ndarray:
        asked.append(positions.size)
        return plain(self, epoch, positions)

    monkeypatch.setattr(Sampler, "_order", order)
    sampler = Sampler(10**9, 32 * MOST, seed=1)
    assert len(next(sampler.epoch(0, 0, Share.equal(MOST - 1, MOST))).indices) == 32
    assert len(sampler.batch(0, 0, Share.equal(0, MOST)).indices) == 32
    assert asked == [1 << 14, 32]  # a block of steps at once, as on one rank


def test_growth_is_told_from_digits_and_noise():
    sizes = (1, 2, 64, 4096)
    assert growth(dict.fromkeys(sizes, 5.0)) == "flat"
    assert growth({1: 0, 2: 100, 64: 104, 4096: 110}) == "flat"
    assert growth({size: 3.0 * rounds(size) for size in sizes}) == "log n"
    assert growth({size: float(size) for size in sizes}) == "linear"
    assert growth({size: 100.0 + size * size for size in sizes}) == "more than linear"
    assert growth(dict.fromkeys(sizes, 0.0)) == "flat"


def test_the_model_has_rounds_for_all_and_bytes_for_what_is_gathered():
    reduced, gathered = Call("", "allreduce", "x", 8, 8), Call("", "allgather", "x", 8, 8 * 4096)
    assert [rounds(size) for size in SIZES] == [0, 1, 3, 6, 9, 12]
    assert model_s(reduced, 4096, 1.0, 0.5) == 12 * (1 + 4)
    assert model_s(gathered, 4096, 1.0, 0.5) == 24 + 4096 * 4
    assert model_s(reduced, 1, 1.0, 0.5) == 0
