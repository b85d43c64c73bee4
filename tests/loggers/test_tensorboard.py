"""Curves, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.loggers.tensorboard import TensorBoardLogger
from hvdtrain.state import TrainState


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    # TensorBoard's switch to do without TensorFlow, which is imported for seconds otherwise.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def _read(directory: Path) -> dict[str, list[tuple[int, float]]]:
        events = accumulator.EventAccumulator(str(directory)).Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    return _read


def test_curves_are_read_back_with_names_steps_and_values(tmp_path: Path, read: Any) -> None:
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    for step in (10, 20, 30):
        logger.log(TrainState(step=step), {"train/loss": 1 / step, "speed/samples_per_s": 1000.0})
    logger.log(TrainState(step=30), {"valid/accuracy": 0.5})
    logger.close()
    curves = read(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(step, pytest.approx(1 / step)) for step in (10, 20, 30)]
    assert curves["speed/samples_per_s"] == [(10, 1000.0), (20, 1000.0), (30, 1000.0)]
    assert curves["valid/accuracy"] == [(30, 0.5)]
    assert len(curves) == 3
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("resumed_at", [30, 20, 10])
def test_a_resumed_run_continues_the_curve_from_its_checkpoint(tmp_path: Path, read: Any, resumed_at: int) -> None:
    for run, first in enumerate((0, resumed_at)):
        logger = TensorBoardLogger(tmp_path)
        for step in range(first + 10, first + 40, 10):
            logger.log(TrainState(step=step), {"train/loss": float(run)})
        logger.close()
    expected = [(step, 0.0) for step in range(10, resumed_at + 10, 10)]
    expected += [(step, 1.0) for step in range(resumed_at + 10, resumed_at + 40, 10)]
    assert read(tmp_path)["train/loss"] == expected


def test_points_can_be_read_while_the_run_goes_on(tmp_path: Path, read: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    for count in (1, 2, 3):
        logger.log(TrainState(step=count), {"train/loss": 0.5})
        assert len(read(tmp_path)["train/loss"]) == count
    logger.close()


def test_a_figure_that_is_not_a_number_is_kept(tmp_path: Path, read: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log(TrainState(step=1), {"train/loss": math.nan})
    logger.close()
    ((step, value),) = read(tmp_path)["train/loss"]
    assert (step, math.isnan(value)) == (1, True)


def test_a_full_disk_is_warned_of_once(tmp_path: Path, read: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log(TrainState(step=1), {"train/loss": 0.5})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (next(tmp_path.iterdir()).stat().st_size + 5, before[1]))
        logger.log(TrainState(step=2), {"train/loss": 0.5})
        logger.log(TrainState(step=3), {"train/loss": 0.5})
        logger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("cannot be written") == 1
    assert read(tmp_path)["train/loss"] == [(1, 0.5)]


def test_nothing_logged_leaves_no_file(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_writing_imports_no_framework(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from hvdtrain.loggers.tensorboard import TensorBoardLogger
        from hvdtrain.state import TrainState
        logger = TensorBoardLogger(Path("curves"))
        logger.log(TrainState(1), {"x": 1.0})
        logger.close()
        sys.exit(sorted({"tensorflow", "torch", "keras"} & set(sys.modules)) or 0)
    """
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "curves").is_dir()
