"""Files in a run directory, which other programs read while the run goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.rundir import RunDir, claimed_at, create, held, read_json_lines, write_json


def test_the_names_of_files_do_not_change() -> None:
    run = RunDir(Path("runs/a"))
    names = [run.run_json, run.summary_json, run.metrics_jsonl, run.checkpoints, run.tensorboard, run.error_json(3)]
    assert [path.relative_to(run.path).as_posix() for path in names] == [
        "run.json",
        "summary.json",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "errors/rank-3.json",
    ]


def test_json_is_written_whole_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": 1, "path": Path("y"), "figure": np.float64(0.5)})
    assert json.loads(path.read_text()) == {"x": 1, "path": "y", "figure": 0.5}
    assert os.listdir(path.parent) == ["b.json"]


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, loop)
    assert json.loads(path.read_text()) == {"x": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"numbers": [0] * 1000})
    with path.open() as reader:  # opened before, read after the next write
        write_json(path, {"numbers": [1] * 2000})
        assert json.load(reader) == {"numbers": [0] * 1000}
    assert json.loads(path.read_text()) == {"numbers": [1] * 2000}


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n' + '{"a": 3}\n'[:cut])
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").touch()
    assert list(read_json_lines(tmp_path / "lines.jsonl")) == []


def test_a_run_directory_is_held_by_one_job_at_a_time(tmp_path: Path) -> None:
    held = RunDir(tmp_path / "run").claim()
    with pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on "):
        RunDir(tmp_path / "run").claim()
    held.close()
    RunDir(tmp_path / "run").claim().close()


def test_looking_whether_a_run_directory_is_held_makes_and_takes_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.check_free()
    assert not run_dir.path.exists()
    with run_dir.claim(), pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on "):
        run_dir.check_free()
    run_dir.check_free()
    run_dir.claim().close()


def test_a_run_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to: "):
        RunDir(tmp_path / "file").claim()


def test_a_folder_is_held_while_a_job_runs_and_is_not_left_behind_with_nothing_in_it(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with held(logs, "folder for logs", "--log-dir"):
        with (
            pytest.raises(UsageError, match=r"the folder for logs .* is in use") as caught,
            held(logs, "folder for logs", "--log-dir"),
        ):
            pass
        assert caught.value.hint.endswith("--log-dir DIR")
    assert not logs.exists()
    with held(logs, "folder for logs", "--log-dir"):
        (logs / "launcher").touch()
    assert (logs / "launcher").exists()


def test_two_jobs_of_the_same_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = {create("a/digits.py") for _ in range(5)}
    assert len(made) == 5
    assert all(path.is_dir() and path.parts[0] == "runs" and path.name.startswith("digits-2") for path in made)


def test_a_folder_is_claimed_anew_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert claimed_at(tmp_path) is None
    RunDir(tmp_path).claim().close()
    os.utime(tmp_path / ".lock", (1, 1))
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    RunDir(tmp_path).claim().close()
    claimed = claimed_at(tmp_path)
    assert claimed is not None
    assert claimed > 1
