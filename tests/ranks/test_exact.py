"""N ranks compute what one process would: the same samples, in the same order, to the same weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.sampler import Sampler
from tests.support import recipes
from tests.support.harness import batches, difference, train, weights

pytestmark = pytest.mark.ranks

STEPS = 30
#: 1e-5 is asked for; float32 sums in another order give less
BOUND = 1e-5
JOBS = [("torch", 2, "mpirun"), ("torch", 3, "mpirun"), ("torch", 2, "horovodrun-gloo")]
JOBS += [("keras", *job[1:]) for job in JOBS] + [
    ("linear", 2, "mpirun"),
    ("linear", 3, "mpirun"),
    ("linear", 2, "horovodrun-gloo"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    base = tmp_path_factory.mktemp("exact")

    @cache
    def run(framework: str, ranks: int, launcher: str = "") -> Path:
        return train(framework, ranks, launcher, base / f"{framework}-{ranks}-{launcher}", "--max-steps", str(STEPS))

    return run


@pytest.mark.parametrize(("framework", "ranks", "launcher"), JOBS)
def test_ranks_agree_bit_for_bit_and_equal_a_single_process(trained, framework, ranks, launcher):
    single, job = trained(framework, 1), trained(framework, ranks, launcher)
    for rank in range(1, ranks):
        for mine, primary in zip(weights(job, rank), weights(job), strict=True):
            assert np.array_equal(mine, primary), f"rank {rank} differs from rank 0"
    largest = difference(weights(job), weights(single))
    print(f"{framework:14} {ranks} ranks {launcher:15} largest relative difference {largest:.1e}")
    assert largest <= BOUND


def test_the_sample_order_is_the_same_in_all_frameworks_and_at_all_sizes(trained):
    sampler = Sampler(recipes.SAMPLES, 64, seed=5)
    expected = [part.indices.tolist() for epoch in (0, 1) for part in sampler.epoch(epoch)][:STEPS]
    runs = [(framework, 1, "") for framework in ("torch", "keras", "linear")]
    runs += [(framework, ranks, "mpirun") for framework in ("torch", "keras", "linear") for ranks in (2, 3)]
    for framework, ranks, launcher in runs:
        loaded = batches(trained(framework, ranks, launcher), ranks)
        assert loaded[:STEPS] == expected, (framework, ranks)
        print(f"{framework:14} {ranks} ranks: batch 0 begins {loaded[0][:6]}, the last one {loaded[STEPS - 1][:6]}")


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("ranks", [3, 1])
def test_resuming_in_the_middle_of_an_epoch_at_another_size_is_exact(trained, tmp_path, framework, ranks):
    whole = trained(framework, 2, "mpirun")
    run_dir = tmp_path / "run"
    first = train(framework, 2, "mpirun", tmp_path / "first", "--run-dir", run_dir, "--max-steps", "7")
    second = train(framework, ranks, "mpirun", tmp_path / "second", "--run-dir", run_dir, "--max-steps", str(STEPS))
    stopped = [index for batch in batches(first, 2)[:7] for index in batch]
    per_epoch = Sampler(recipes.SAMPLES, 64).steps_per_epoch
    resumed = [index for batch in batches(second, ranks)[: per_epoch - 7] for index in batch]
    assert sorted(stopped + resumed) == list(range(recipes.SAMPLES)), "not every sample of the epoch exactly once"
    assert difference(weights(second), weights(whole)) <= BOUND
