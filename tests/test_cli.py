"""Bad input gets a clear message, an exit code and no traceback; and the command line starts fast."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.rundir import RunDir
from tests.support.harness import ROOT, hvdtrain

LINEAR = f"{ROOT}/tests/support/recipes.py:linear"

BAD_RECIPES = {
    "raises.py": "def recipe():\n    raise OSError('no such data')\n",
    "at_import.py": "recipe = 1 / 0\n",
    "syntax.py": "def recipe(:\n",
    "missing.py": "import no_such_package as recipe\n",
    "wrong.py": "def recipe():\n    return 42\n",
    "other.py": "def recpie():\n    return None\n",
    "typed.py": "def recipe(*, hidden: int = 3, lr: float = 0.1):\n    return None\n",
    "empty.py": (
        "import hvdtrain, numpy\nfrom hvdtrain.adapters.linear import LinearAdapter\n"
        "def recipe():\n"
        "    return hvdtrain.Recipe(adapter=LinearAdapter(2, 2), train=(numpy.zeros((0, 2)), numpy.zeros(0)))\n"
    ),
}

# arguments of `hvdtrain train` -> what the message must say
BAD_INPUT = {
    ("nowhere.py",): "the recipe nowhere.py does not exist",
    (".",): "the recipe . is a directory",
    ("no.such.module:recipe",): "there is no module 'no.such.module'",
    ("raises.py",): "raises.py:2: OSError: no such data",
    ("at_import.py",): "at_import.py:1: ZeroDivisionError",
    ("syntax.py",): "syntax.py:1: SyntaxError",
    ("missing.py",): "pip install no_such_package into",
    ("wrong.py",): "must return an hvdtrain.Recipe, got a int",
    ("other.py",): "name one as other.py:recpie",
    (
        "typed.py",
        "--set",
        "hiden=4",
        "--set",
        "lr=fast",
    ): "no parameter 'hiden' (did you mean 'hidden'?); lr: expected float, got 'fast'",
    ("typed.py", "--set", "hidden"): "--set takes NAME=VALUE, got 'hidden'",
    ("empty.py",): "the data source has no sample",
    (LINEAR, "--epochs", "0"): "epochs: must be at least 1, got 0",
    (LINEAR, "--resume", "elsewhere"): "cannot resume: elsewhere does not exist",
    (LINEAR, "--config", "none.yaml"): "none.yaml",
    (): "hvdtrain.yaml",
}


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    for name, text in BAD_RECIPES.items():
        (in_tmp / name).write_text(text)
    return in_tmp


@pytest.mark.parametrize("arguments", BAD_INPUT, ids=" ".join)
def test_bad_input_is_told_in_one_message_without_a_traceback(folder, arguments):
    result = hvdtrain("train", *arguments, cwd=folder)
    assert BAD_INPUT[arguments] in result.stderr
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_a_failure_while_training_keeps_its_traceback_and_is_written_down(in_tmp):
    (in_tmp / "late.py").write_text(
        "import dataclasses, hvdtrain\nfrom tests.support.recipes import linear\n"
        "class Late(hvdtrain.Callback):\n    def on_step_end(self, state):\n        if state.step == 3: raise KeyError('gone')\n"
        "def recipe():\n    return dataclasses.replace(linear(), callbacks=(Late(),))\n"
    )
    shutil.copytree(ROOT / "tests", in_tmp / "tests", ignore=shutil.ignore_patterns("__pycache__", "ranks", "launch"))
    result = hvdtrain("train", "late.py", "--run-dir", "run", cwd=in_tmp)
    assert result.returncode == 1
    assert "KeyError: 'gone'" in result.stderr
    words = json.loads((in_tmp / "run/errors/rank-0.json").read_text())
    assert (words["rank"], words["exit_code"], words["phase"]) == (0, 1, "training step, step 3")
    assert "on_step_end" in words["traceback"]


def test_training_writes_what_the_run_directory_promises(in_tmp):
    result = hvdtrain("train", LINEAR, "--run-dir", "run", "--seed", "3", cwd=in_tmp)
    assert result.returncode == 0, result.stderr
    run = json.loads((in_tmp / "run/run.json").read_text())
    assert (run["options"]["seed"], run["origins"]["seed"], run["origins"]["keep"]) == (3, "command line", "default")
    assert (run["options"]["batch_size"], run["origins"]["batch_size"]) == (64, "recipe")
    assert (run["settings"]["samples"], run["origins"]["set.samples"]) == (1003, "recipe")
    lines = [json.loads(line) for line in (in_tmp / "run/metrics.jsonl").read_text().splitlines()]
    assert {"step", "epoch", "train/loss", "speed/samples_per_s"} <= lines[0].keys()
    assert json.loads((in_tmp / "run/summary.json").read_text())["steps"] == 32
    assert list((in_tmp / "run/tensorboard").iterdir())
    assert "step 32/32" in result.stdout


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(in_tmp):
    hvdtrain("train", LINEAR, "--run-dir", "run", "--save-every", "4", "--max-steps", "8", cwd=in_tmp)
    (in_tmp / "run/checkpoints/step-00000008/model/model.npz").write_bytes(b"")
    result = hvdtrain("train", LINEAR, "--run-dir", "run", cwd=in_tmp)
    assert result.returncode == 0
    assert "step-00000008 is damaged" in result.stderr
    assert "resuming at step 4" in result.stdout


def test_options_come_from_the_config_file_and_the_command_line_wins(in_tmp):
    (in_tmp / "hvdtrain.yaml").write_text(f"recipe: {LINEAR}\nset:\n  samples: 100\nepochs: 1\nrun_dir: run\nlog-every: 1\n")
    result = hvdtrain("train", "--epochs", "3", cwd=in_tmp)
    assert result.returncode == 0, result.stderr
    run = json.loads((in_tmp / "run/run.json").read_text())
    assert (run["options"]["epochs"], run["origins"]["epochs"], run["origins"]["log_every"]) == (
        3,
        "command line",
        "hvdtrain.yaml",
    )
    assert json.loads((in_tmp / "run/summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("closed", ["| head -1", ">&-", "> /dev/full"])
def test_output_that_nobody_can_read_does_not_end_a_training(in_tmp, closed):
    command = f"{sys.executable} -m hvdtrain train {LINEAR} --run-dir run {closed}"
    subprocess.run(["bash", "-c", command], cwd=in_tmp, capture_output=True, check=False)
    assert json.loads((in_tmp / "run/summary.json").read_text())["steps"] == 32


def test_ctrl_c_while_a_sample_hangs_ends_soon_and_says_how_to_go_on(in_tmp):
    (in_tmp / "hangs.py").write_text(
        "import dataclasses, time\nfrom tests.support import recipes\n"
        "class Items:\n    def __len__(self): return 99\n    def __getitem__(self, index): time.sleep(100)\n"
        "def recipe():\n    print('ready', flush=True)\n    return dataclasses.replace(recipes.linear(), train=Items())\n"
    )
    command = [sys.executable, "-m", "hvdtrain", "train", "hangs.py", "--run-dir", "run"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=in_tmp, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "files in" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Error: interrupted: " in errors
    assert "Traceback" not in errors
    assert "--run-dir run" in errors


def test_a_signal_that_comes_when_the_training_is_over_changes_nothing(in_tmp):
    Path("late.py").write_text(
        "import atexit, os, runpy, signal\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGUSR1)\n"
        f"recipe = runpy.run_path({LINEAR.partition(':')[0]!r})['linear']\n"
    )
    result = hvdtrain("train", "late.py", "--max-steps", 2, cwd=in_tmp)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_working_directory_that_is_gone_is_told(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -m hvdtrain train x.py"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "the current directory does not exist any more" in result.stderr
    assert result.returncode == 2


def test_a_run_directory_in_use_is_refused(in_tmp):
    held = RunDir(in_tmp / "run").claim()
    result = hvdtrain("train", LINEAR, "--run-dir", "run", cwd=in_tmp)
    assert "is in use by process" in result.stderr
    assert result.returncode == 2
    assert [path.name for path in (in_tmp / "run").iterdir()] == [".lock"]
    held.close()


@pytest.mark.parametrize("example", ["linear_numpy", "torch_digits", "keras_digits"])
def test_each_example_runs_with_plain_python(in_tmp, example):
    command = [sys.executable, ROOT / "examples" / f"{example}.py", "--max-steps", "2", "--run-dir", "run"]
    result = subprocess.run(command, cwd=in_tmp, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads((in_tmp / "run/summary.json").read_text())["steps"] == 2


def test_help_is_there_in_under_150_ms():
    """Processor time, the best of ten, so that a busy machine does not fail it."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "hvdtrain", "--help"], check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(10)) < 0.15


def test_a_bare_command_shows_the_help(in_tmp):
    result = hvdtrain(cwd=in_tmp)
    assert "Usage: hvdtrain" in result.stdout + result.stderr
