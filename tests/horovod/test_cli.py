"""The commands, on the real environment of the tests."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hvdtrain.cli import horovod as cli
from hvdtrain.horovod import buildinfo, require
from hvdtrain.horovod.buildinfo import BuildInfo
from hvdtrain.horovod.status import FrameworkStatus, Problem, Status


def test_horovod_of_this_environment_is_sound() -> None:
    result = CliRunner().invoke(cli.command, ["status", "--json"], standalone_mode=False)
    state = json.loads(result.stdout)
    assert state["problems"] == []
    assert result.return_value == 0
    assert state["ok"]
    assert state["gloo"]
    assert state["mpi"] != ""
    assert {framework["name"] for framework in state["frameworks"]} == set(buildinfo.installed_frameworks())


@pytest.mark.parametrize("framework", sorted(buildinfo.installed_frameworks()))
def test_horovod_of_this_environment_can_be_required(framework: str) -> None:
    require(framework)


def test_a_problem_is_shown_with_its_cure_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Status(
        "0.28.1",
        "3.11.7",
        frameworks=(FrameworkStatus("torch", "2.14.1", "2.13.0", loads=False, error="undefined symbol"),),
        built=BuildInfo("0.28.1", {"torch": "2.13.0"}, python="cpython-311", compiler="g++ 12"),
        problems=(Problem("Horovod was built for torch 2.13.0, but 2.14.1 is installed", "hvdtrain horovod install"),),
    )
    monkeypatch.setattr(cli, "collect", lambda: state)
    result = CliRunner().invoke(cli.command, ["status"], standalone_mode=False)
    assert result.return_value == 1
    assert "2.14.1" in result.stdout
    assert "Problem: Horovod was built for torch 2.13.0, but 2.14.1 is installed" in result.stdout
    assert "Mend it with: hvdtrain horovod install" in result.stdout


@pytest.mark.parametrize("arguments", [["install", "--jobs", "0"], ["install", "--gpu", "perhaps"], ["nonsense"]])
def test_wrong_options_are_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.command, arguments).exit_code == 2


def test_plain_lines_show_every_tenth_per_cent(capsys: pytest.CaptureFixture[str]) -> None:
    lines = cli._Lines()
    lines.stage("Compiling")
    for value in range(0, 101, 3):
        lines.percent(value)
    shown = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["Compiling", "12 %", "21 %", "30 %", "42 %", "51 %", "60 %", "72 %", "81 %", "90 %"]
