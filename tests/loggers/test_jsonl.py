"""Figures as JSON lines, for programs that read while the run goes on."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.loggers.jsonl import JsonLinesLogger
from hvdtrain.rundir import read_json_lines
from hvdtrain.state import TrainState


def _log(path: Path, *steps: int) -> None:
    logger = JsonLinesLogger(path)
    for step in steps:
        logger.log(TrainState(step, 1, 0, step * 64), {"train/loss": 1 / step})
    logger.close()


def test_a_line_tells_time_state_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "made" / "metrics.jsonl"
    before = time.time()
    _log(path, 4)
    (line,) = read_json_lines(path)
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 4, "epoch": 1, "samples": 256, "train/loss": 0.25}


def test_another_process_sees_each_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    for step in (1, 2, 3):
        logger.log(TrainState(step), {"x": 0.5})
        assert [line["step"] for line in read_json_lines(path)] == list(range(1, step + 1))
    logger.close()


def test_a_resumed_run_adds_to_what_is_there(tmp_path: Path) -> None:
    _log(tmp_path / "m.jsonl", 1, 2)
    _log(tmp_path / "m.jsonl", 3)
    assert [line["step"] for line in read_json_lines(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_what_lies_after_the_step_of_a_resumed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    _log(path, 1, 2, 3)
    with path.open("a") as file:
        file.write("a note of somebody's\n")
    _log(path, 4, 5)
    JsonLinesLogger(path, 3).close()
    assert [line[:9] for line in path.read_text().splitlines()] == ['{"time": '] * 3 + ["a note of"]
    JsonLinesLogger(path, 0).close()
    assert path.read_text() == "a note of somebody's\n"
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("part", ['{"time": 1, "st', "{", '{"step": 3}'])
def test_a_line_that_a_killed_run_left_unfinished_damages_no_other(tmp_path: Path, part: str) -> None:
    path = tmp_path / "m.jsonl"
    _log(path, 1, 2)
    with path.open("a") as file:
        file.write(part)
    _log(path, 4)
    assert [line["step"] for line in read_json_lines(path)] == [1, 2, 4]


def test_a_file_of_nothing_but_an_unfinished_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"st')
    _log(path, 1)
    assert [line["step"] for line in read_json_lines(path)] == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_no_number_is_null_and_the_line_any_programs_json(tmp_path: Path, value: float) -> None:
    logger = JsonLinesLogger(tmp_path / "m.jsonl")
    logger.log(TrainState(1), {"train/loss": value, "train/accuracy": 0.5})
    logger.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert (line["train/loss"], line["train/accuracy"]) == (None, 0.5)


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.array(0.5)])
def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path: Path, value: float) -> None:
    logger = JsonLinesLogger(tmp_path / "m.jsonl")
    logger.log(TrainState(1), {"train/lr": value})
    logger.close()
    assert next(read_json_lines(tmp_path / "m.jsonl"))["train/lr"] == 0.5


@pytest.fixture
def small_limit() -> Iterator[Callable[[int], None]]:
    """Files of this process may not grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_warned_of_once_and_lines_go_on_when_there_is_space_again(
    tmp_path: Path, small_limit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    logger = JsonLinesLogger(path)
    logger.log(TrainState(1), {"x": 0.5})
    small_limit(path.stat().st_size + 10)
    logger.log(TrainState(2), {"x": 0.5})
    logger.log(TrainState(3), {"x": 0.5})
    small_limit(1 << 20)
    logger.log(TrainState(4), {"x": 0.5})
    logger.close()
    assert [line["step"] for line in read_json_lines(path)] == [1, 4]
    assert caplog.text.count("m.jsonl cannot be written") == 1


def test_a_file_that_cannot_be_begun_is_warned_of_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.jsonl").mkdir()
    logger = JsonLinesLogger(tmp_path / "m.jsonl")
    logger.log(TrainState(1), {"x": 0.5})
    logger.close()
    assert caplog.text.count("m.jsonl cannot be written") == 1
