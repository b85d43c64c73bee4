"""Models over several ranks as a user trains them: checkpoints, evaluation, faults."""

from __future__ import annotations

import functools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.support import harness
from tests.support.harness import ROOT

pytestmark = pytest.mark.ranks

#: its recipes import from tests/
hvdtrain = functools.partial(harness.hvdtrain, PYTHONPATH=str(ROOT))

RECIPES = ROOT / "tests" / "support" / "pipelines.py"
#: two and three stages, and two stages of two replicas
WAYS = {"2 ranks": (2, 2), "3 ranks": (3, 3), "4 ranks": (4, 2)}


def start(ranks: int, stages: int, recipe: str | Path, *options: str | int) -> list[str]:
    """The words of a command."""
    before = ["run", "-np", ranks, "-H", f"localhost:{ranks}", "--launcher", "mpirun"] if ranks > 1 else ["train"]
    return list(map(str, [*before, recipe, "--pipeline", stages, *options]))


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in sorted((run / f"checkpoints/step-{step:08d}/model").glob("model-*.safetensors")):
        found |= safetensors.numpy.load_file(path)
    return found


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_checkpoint_of_two_stages_goes_on_with_any_other_number_and_is_evaluated_as_by_one_process(tmp_path, framework):
    recipe = f"{RECIPES}:{framework}"

    def train(ranks: int, stages: int, run: str, steps: int) -> dict[str, np.ndarray]:
        result = hvdtrain(*start(ranks, stages, recipe, "--max-steps", steps, "--run-dir", run), cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        return weights(tmp_path / run, steps)

    alone = train(1, 1, "alone", 12)
    half = train(2, 2, "half", 6)
    assert half.keys() == alone.keys()
    for name, (ranks, stages) in {"1 process": (1, 1), **WAYS}.items():
        shutil.copytree(tmp_path / "half", tmp_path / name)
        found = train(ranks, stages, name, 12)
        assert found.keys() == alone.keys()
        for tensor, array in alone.items():
            assert np.abs(found[tensor] - array).max() <= 1e-5 * np.abs(array).max(), (name, tensor)
    values = {
        name: json.loads((tmp_path / name / "summary.json").read_text())["valid"] for name in ("alone", "1 process", *WAYS)
    }
    assert set(values["alone"]) == {"valid/loss", "valid/accuracy"}
    for name, found in values.items():
        assert found == pytest.approx(values["alone"], rel=1e-5), name


def test_dropout_over_stages_is_reproducible(tmp_path):
    for name in ("first", "second", "recomputed"):
        more = ["--recompute"] if name == "recomputed" else []
        result = hvdtrain(*start(2, 2, f"{RECIPES}:dropout", "--max-steps", 6, "--run-dir", name, *more), cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    first = weights(tmp_path / "first", 6)
    for other in ("second", "recomputed"):
        found = weights(tmp_path / other, 6)
        assert all(np.array_equal(found[name], array) for name, array in first.items())


def test_a_stage_that_raises_ends_the_job_with_its_traceback(tmp_path):
    begun = time.monotonic()
    result = hvdtrain(*start(2, 2, f"{RECIPES}:raises", "--run-dir", "run"), cwd=tmp_path)
    assert result.returncode == 1
    assert time.monotonic() - begun < 40
    assert "in forward" in result.stderr
    assert "ValueError: no more" in result.stderr
    words = json.loads((tmp_path / "run/errors/rank-1.json").read_text())
    assert words["phase"] == "training step, step 3"


def test_a_gradient_that_is_not_finite_is_told_with_its_stage_and_tensor(tmp_path):
    result = hvdtrain(*start(2, 2, f"{RECIPES}:infinite", "--run-dir", "run"), cwd=tmp_path)
    assert result.returncode == 1
    assert "is not finite on rank" in result.stderr


def test_splits_are_told_and_measured(tmp_path):
    for split in ("time", "memory", "2,3,1"):
        options = ["--max-steps", 2, "--split", split, "--run-dir", f"run-{split}"]
        result = hvdtrain(*start(3, 3, f"{RECIPES}:torch", *options), cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        text = result.stdout + result.stderr
        assert f"pipeline of 3 stages, 1f1b, split by {split}" in text
        assert "stage 2 on rank 2: layers" in text


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (3, [], "3 ranks cannot be divided into pipelines of 2 stages"),
        (2, ["--split", "3,5"], "its layers add up to 8, the model has 6"),
        (2, ["--split", "evenly"], "--split evenly"),
        (2, ["--virtual-stages", 2], "schedule 1f1b has one virtual stage on each rank, not 2"),
        (4, ["--exchange", "shared"], "--exchange shared is not possible"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks_with_the_reason(tmp_path, ranks, options, message):
    result = hvdtrain(*start(ranks, 2, f"{RECIPES}:torch", *options, "--run-dir", "run"), cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_job_over_gloo_is_refused(tmp_path):
    words = ["run", "-np", 2, "-H", "localhost:2", "--launcher", "horovodrun", "--gloo", f"{RECIPES}:torch", "--pipeline", 2]
    result = hvdtrain(*words, "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "a pipeline needs MPI" in result.stdout + result.stderr


def test_horovod_may_have_been_initialised_before_mpi4py(tmp_path):
    (tmp_path / "first.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport horovod.torch as hvd\nhvd.init()\n"
        "from tests.support.pipelines import torch as recipe\n"
    )
    result = hvdtrain(*start(2, 2, "first.py:recipe", "--max-steps", 3, "--run-dir", "run"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_recipe_whose_model_is_no_list_of_layers_is_refused(tmp_path):
    result = hvdtrain(*start(2, 2, ROOT / "examples/torch_digits.py", "--run-dir", "run"), cwd=tmp_path)
    assert result.returncode == 2
    assert "needs a model as a list of layers" in result.stdout + result.stderr
