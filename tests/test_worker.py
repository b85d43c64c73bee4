"""What a rank does around the training loop."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.devices import pin_device
from hvdtrain.launch.failures import JOB_VARIABLE
from hvdtrain.launch.frames import WORDS_WANTED, split_words
from hvdtrain.rank import guard
from hvdtrain.rundir import RunDir, default_name
from hvdtrain.world import World


@pytest.mark.parametrize(
    ("visible", "local_rank", "chosen"), [("4,5", 0, "4"), ("4,5", 1, "5"), ("GPU-aa,GPU-bb", 1, "GPU-bb"), ("", 1, "")]
)
def test_each_local_rank_sees_its_own_gpu_alone(visible, local_rank, chosen):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    pin_device(World(rank=local_rank + 2, size=4, local_rank=local_rank, local_size=2, source="open mpi"), environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": chosen}


def test_more_ranks_than_gpus_share_them_with_a_warning(caplog):
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    pin_device(World(rank=2, size=3, local_rank=2, local_size=3, source="open mpi"), environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "rank 2 shares a GPU" in caplog.text


def test_a_gpu_that_slurm_has_bound_is_kept():
    environ = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}
    pin_device(World(rank=3, size=4, local_rank=3, local_size=4, source="slurm"), environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_single_process_keeps_all_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    pin_device(World(), environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("recipe", "start"),
    [
        ("examples/torch_digits.py", "runs/torch_digits-2"),
        ("a/b.py:other", "runs/b-other-2"),
        ("pkg.mod:recipe", "runs/mod-2"),
    ],
)
def test_the_default_run_directory_names_the_recipe(recipe, start):
    assert str(default_name(recipe)).startswith(start)


def failing(run_dir, *, claimed=False):
    def body(rank):
        rank.run_dir, rank.is_claimed = run_dir, claimed
        raise KeyError("gone")

    return body


def test_last_words_go_to_the_relay_and_to_the_run_directory_with_the_jobs_name(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(JOB_VARIABLE, "a1")
    assert guard(failing(RunDir(tmp_path))) == 1
    assert "\x1e" not in capfd.readouterr().err
    monkeypatch.setenv(WORDS_WANTED, "1")
    assert guard(failing(RunDir(tmp_path))) == 1
    heard = [words for line in capfd.readouterr().err.split("\n") if (words := split_words(line)[1])]
    assert heard == [json.loads((tmp_path / "errors/rank-0.json").read_text())]
    assert (heard[0]["job"], heard[0]["error"], heard[0]["exit_code"]) == ("a1", "KeyError: 'gone'", 1)


def test_last_words_are_not_written_into_a_run_directory_that_another_job_holds(tmp_path, capfd):
    with RunDir(tmp_path).claim():
        assert guard(failing(RunDir(tmp_path))) == 1
        assert "KeyError: 'gone'" in capfd.readouterr().err
        assert not (tmp_path / "errors").exists()
        assert guard(failing(RunDir(tmp_path), claimed=True)) == 1  # it is this job that holds it
        assert (tmp_path / "errors/rank-0.json").exists()


def out_of_memory_errors():
    import torch

    yield MemoryError()
    yield torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for take in (lambda: torch.empty(1 << 46), lambda: np.empty(1 << 50)):
        try:
            take()
        except (RuntimeError, MemoryError) as error:
            yield error


def test_a_lack_of_memory_is_told_as_one_with_what_helps(capfd):
    for error in out_of_memory_errors():
        error.add_note("samples 3, 4")

        def body(rank, error=error):
            raise error

        assert guard(body) == 1
        said = capfd.readouterr().err
        assert "Error: out of memory (samples 3, 4): " in said
        assert "Hint: use a smaller --batch-size" in said
