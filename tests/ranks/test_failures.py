"""A rank that fails takes the others with it, and says why."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.harness import LAUNCHERS, RECIPES, ROOT, hvdtrain

pytestmark = pytest.mark.ranks

FAILING = """
import dataclasses, sys
sys.path.insert(0, {root!r})
import hvdtrain
from tests.support import recipes

class Fails(hvdtrain.Callback):
    def on_step_end(self, state):
        if state.step == 3 and hvdtrain.World.from_env().rank == 1:
            raise {error}

def recipe():
    return dataclasses.replace(recipes.linear(), callbacks=(Fails(),))

def other_seed():
    return dataclasses.replace(recipes.linear(), seed=hvdtrain.World.from_env().rank)
"""


def failing(folder: Path, error: str = "KeyError('gone')") -> Path:
    path = folder / "failing.py"
    path.write_text(FAILING.format(root=str(ROOT), error=error))
    return path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failing_rank_ends_the_job_at_once_with_its_reason(tmp_path, launcher):
    started = time.monotonic()
    result = hvdtrain("run", "-np", "2", *LAUNCHERS[launcher], failing(tmp_path), "--run-dir", "run", cwd=tmp_path)
    assert time.monotonic() - started < 40
    assert result.returncode == 1
    assert "KeyError: 'gone'" in result.stderr
    words = json.loads((tmp_path / "run/errors/rank-1.json").read_text())
    assert (words["rank"], words["phase"]) == (1, "training step, step 3")


def test_ranks_that_disagree_stop_before_the_first_step_and_the_primary_speaks_for_all(tmp_path):
    recipe = f"{failing(tmp_path)}:other_seed"
    result = hvdtrain("run", "-np", "2", *LAUNCHERS["mpirun"], recipe, "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 1
    assert "rank 1 is set up otherwise than rank 0: seed 1 instead of 0" in result.stdout + result.stderr
    assert [path.name for path in (tmp_path / "run/errors").iterdir()] == ["rank-0.json"]
    assert "\nrank 1 stopped because of that\n" in result.stderr


def test_a_mistake_of_the_user_on_all_ranks_ends_with_code_2_and_no_traceback(tmp_path):
    result = hvdtrain(
        "run", "-np", "2", *LAUNCHERS["mpirun"], f"{RECIPES}:linear", "--set", "sampels=3", "--run-dir", "run", cwd=tmp_path
    )
    assert result.returncode == 2
    assert "did you mean 'samples'?" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun-gloo"])
def test_a_launcher_typed_by_hand_works_too(tmp_path, launcher):
    """The commands of the README, as a shell would run them."""
    import os
    import shutil
    import subprocess
    import sys

    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    start = {
        "mpirun": ["mpirun", "--oversubscribe", "-np", "2"],
        "horovodrun": ["horovodrun", "-np", "2", "-H", "localhost:2"],
        "horovodrun-gloo": ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"],
    }[launcher]
    assert shutil.which("hvdtrain", path=env["PATH"])
    command = [*start, "hvdtrain", "train", f"{RECIPES}:linear", "--max-steps", "3", "--run-dir", "run"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["ranks"], summary["steps"]) == (2, 3)
