"""N ranks compute what one process would: the same samples, in the same order, to the same weights."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.sampler import Sampler
from tests.support import recipes
from tests.support.harness import LAUNCHERS, RECIPES, batches, difference, hvdtrain, train, weights

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


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_job_killed_at_a_random_step_and_resumed_ends_with_the_weights_of_an_undisturbed_one(trained, tmp_path, framework):
    step = random.SystemRandom().randrange(6, STEPS)
    run_dir, recipe = tmp_path / "run", f"{RECIPES}:{framework}"
    start = ["run", "-np", "2", "-H", "localhost:2", *LAUNCHERS["mpirun"]]
    options = ["--run-dir", run_dir, "--save-every", "4", "--max-steps", str(STEPS)]
    killed = hvdtrain(*start, recipe, "--set", f"kill={step}", *options, cwd=tmp_path)
    assert killed.returncode not in (0, 2), killed.stdout + killed.stderr
    saved = max(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved < f"step-{STEPS:08d}"
    out = train(framework, 2, "mpirun", tmp_path / "again", *options)
    largest = difference(weights(out), weights(trained(framework, 2, "mpirun")))
    print(f"{framework:14} killed after step {step}, resumed from {saved}: largest relative difference {largest:.1e}")
    assert largest <= BOUND
    logged = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert logged == sorted(logged)  # nothing that the killed job logged beyond its checkpoint is left


def test_only_the_primary_needs_to_see_the_checkpoints(trained, tmp_path):
    """Each rank works in a directory of its own, as on hosts that share no file system."""
    steps = ["--max-steps", "7"], ["--max-steps", str(STEPS)]
    for number, options in enumerate(steps):
        out = tmp_path / f"out-{number}"
        words = ["-m", "hvdtrain", "train", f"{RECIPES}:linear", "--set", f"out={out}", "--run-dir", "run", *options]
        script = (
            f"mkdir -p rank-$OMPI_COMM_WORLD_RANK && cd rank-$OMPI_COMM_WORLD_RANK && exec {sys.executable} {' '.join(words)}"
        )
        program = ["--", "sh", "-c", script]
        result = hvdtrain("run", "-np", "2", "-H", "localhost:2", *LAUNCHERS["mpirun"], *program, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "rank-0/run/checkpoints").is_dir()
    assert not (tmp_path / "rank-1/run/checkpoints").exists()
    for rank in (0, 1):
        assert difference(weights(out, rank), weights(trained("linear", 1))) <= BOUND
