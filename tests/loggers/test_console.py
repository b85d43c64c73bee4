"""Progress for people, on a terminal and through a launcher's pipe."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest

from hvdtrain.loggers import console
from hvdtrain.loggers.console import ConsoleLogger
from hvdtrain.state import TrainState

FIGURES = {"train/loss": 0.123456, "train/accuracy": 1.0, "speed/samples_per_s": 12345.6}


def _plain(*logged: tuple[TrainState, Mapping[str, float]], first_step: int = 0) -> None:
    logger = ConsoleLogger(40, 2, first_step, live=False)
    for state, values in logged:
        logger.log(state, values)
    logger.close()


def test_a_line_tells_step_epoch_figures_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    _plain((TrainState(step=10, position=640), FIGURES))
    assert re.fullmatch(
        r"step 10/40  epoch 1/2  loss 0\.1235  accuracy 1  12,346 samples/s  left \d+:\d\d\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("state", "epoch"),
    [
        (TrainState(step=1, epoch=0, position=64), "1/2"),
        (TrainState(step=20, epoch=1, position=0), "1/2"),  # the first is done
        (TrainState(step=21, epoch=1, position=64), "2/2"),
        (TrainState(step=40, epoch=2, position=0), "2/2"),
    ],
)
def test_epochs_are_counted_from_one(capsys: pytest.CaptureFixture[str], state: TrainState, epoch: str) -> None:
    _plain((state, FIGURES))
    assert f"epoch {epoch} " in capsys.readouterr().out


def test_validation_figures_stay_beside_newer_training_figures(capsys: pytest.CaptureFixture[str]) -> None:
    _plain(
        (TrainState(step=10, position=1), {"train/loss": 2.0}),
        (TrainState(step=10, position=1), {"valid/loss": math.nan}),
        (TrainState(step=20, position=1), {"train/loss": 1.0}),
    )
    assert "step 20/40  epoch 1/2  loss 1  valid/loss nan (of step 10)  left" in capsys.readouterr().out


def test_through_a_pipe_lines_come_seldom_and_the_last_always(capsys: pytest.CaptureFixture[str]) -> None:
    _plain(*[(TrainState(step=step, position=1), {"train/loss": 1.0}) for step in range(1, 41)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("step 40/40 ")
    assert len(lines) <= 3  # one is usual; a machine that stops for seconds adds some


def test_through_a_pipe_lines_come_while_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PLAIN_EVERY_S", 0.0)
    logger = ConsoleLogger(40, 2, live=False)
    logger.log(TrainState(step=10, position=1), FIGURES)
    assert capsys.readouterr().out.startswith("step 10/40 ")
    logger.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("elapsed_s", "step", "first_step", "left"),
    [
        (10.0, 10, 0, "0:30"),
        (10.0, 40, 0, "0:00"),
        (10.0, 30, 20, "0:10"),  # a resumed run: ten steps in ten seconds
        (600.0, 10, 0, "30:00"),
        (3600.0, 10, 0, "3:00:00"),
        (1225.0, 10, 0, "1:01:15"),
        (0.0, 0, 0, "0:00"),
    ],
)
def test_the_time_left_follows_from_the_steps_of_this_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    elapsed_s: float,
    step: int,
    first_step: int,
    left: str,
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    logger = ConsoleLogger(40, 2, first_step, live=False)
    now[0] = elapsed_s
    logger.log(TrainState(step=step), {})
    logger.close()
    assert capsys.readouterr().out.endswith(f"left {left}\n")


def test_a_terminal_gets_one_live_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    logger = ConsoleLogger(40, 2, first_step=20)
    logger.log(TrainState(step=30, epoch=1, position=64), {"train/f1[macro]": 0.5})
    logger.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "30/40" in text
    assert "epoch 2/2  f1[macro] 0.5" in text
    assert "left" not in text


def test_a_launcher_that_gives_its_ranks_a_terminal_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _plain((TrainState(step=10, position=1), FIGURES))
    assert "\x1b" not in capsys.readouterr().out


def test_a_run_that_logged_nothing_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _plain()
    assert capsys.readouterr().out == ""
