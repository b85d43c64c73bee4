"""The order of an installation: what is taken from the cache, what is built again, what is removed on failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import build, install
from hvdtrain.horovod.build import parse_percent
from hvdtrain.horovod.cache import Cache, cache_folder
from hvdtrain.horovod.install import Options, Outcome
from hvdtrain.horovod.status import Problem, Status
from tests.horovod.examples import PLAN, TOOLS


class Recorder:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, text: str) -> None:
        self.lines.append(text)

    def percent(self, value: int) -> None:
        self.lines.append(f"{value} %")

    def say(self, text: str) -> None:
        self.lines.append(text)


class Machine:
    """Stands in for pip, the compiler and the trial runs; remembers what was asked of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.plan = PLAN
        self.problems: tuple[Problem, ...] = ()
        self.training_problem = ""
        self.environ = {"XDG_CACHE_HOME": str(folder / "cache"), "PATH": "/usr/bin"}
        self.cache = Cache(cache_folder(self.environ))
        machine = self

        def pip(what: str, arguments: list[str], *, shielded: bool = False) -> None:
            machine.done.append(f"pip {arguments[0]}{' shielded' if shielded else ''}")

        def build_wheel(builder: build.Builder, folder: Path) -> Path:
            machine.done.append("build")
            wheel = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
            wheel.write_bytes(b"PK built")
            return wheel

        class Passed:
            problem = machine.training_problem

        def train(name: str, controller: str, *rest: object) -> object:
            machine.done.append(f"train {name} {controller}")
            passed = Passed()
            passed.problem = machine.training_problem
            return passed

        monkeypatch.setattr(install, "make_plan", lambda *rest: machine.plan)
        monkeypatch.setattr(install, "_pip", pip)
        monkeypatch.setattr(install, "_is_installed", lambda key: False)
        monkeypatch.setattr(install, "check", train)
        monkeypatch.setattr(install.status, "collect", lambda: Status("0.28.1", "3.11", problems=machine.problems))
        monkeypatch.setattr(build.Builder, "build", build_wheel)

    def install(self, options: Options | None = None) -> tuple[Outcome, list[str]]:
        self.done.clear()
        reporter = Recorder()
        return install.install(options or Options(), reporter, self.environ), reporter.lines


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


TRAINED = ["train torch mpi", "train torch gloo", "train tensorflow mpi", "train tensorflow gloo"]
INSTALLED = ["pip install", "pip install shielded"]


def test_the_first_time_it_builds_and_trains_and_the_second_time_it_takes_the_cached_wheel(machine: Machine) -> None:
    outcome, lines = machine.install()
    assert (outcome.action, machine.done) == ("built", ["build", *INSTALLED, *TRAINED])
    assert outcome.log is not None
    assert f"Log: {outcome.log}" in lines
    outcome, _ = machine.install()
    assert (outcome.action, machine.done) == ("from the cache", INSTALLED)


def test_other_versions_are_built_anew(machine: Machine) -> None:
    machine.install()
    machine.plan = replace(PLAN, arch_flags="")
    assert machine.install()[0].action == "built"


def test_a_damaged_cached_wheel_is_said_and_built_again(machine: Machine) -> None:
    machine.install()
    wheel = machine.cache.find(PLAN.key)
    assert wheel is not None
    wheel.write_bytes(b"PK damag")
    outcome, lines = machine.install()
    assert outcome.action == "built"
    assert "The cached wheel is damaged; building it again" in lines
    assert machine.install()[0].action == "from the cache"


def test_rebuild_passes_over_the_cache(machine: Machine) -> None:
    machine.install()
    assert machine.install(Options(rebuild=True))[0].action == "built"


def test_verification_of_a_cached_wheel_can_be_asked_for(machine: Machine) -> None:
    machine.install()
    machine.install(Options(verify=True))
    assert machine.done == [*INSTALLED, *TRAINED]


def test_what_is_installed_already_is_left_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_is_installed", lambda key: key == PLAN.key)
    outcome, _ = machine.install()
    assert (outcome.action, machine.done) == ("already installed", [])


def test_a_build_that_does_not_train_is_removed_and_not_cached(machine: Machine) -> None:
    machine.training_problem = "wrong result"
    with pytest.raises(HvdtrainError, match="training two ranks of torch over mpi failed: wrong result"):
        machine.install()
    assert machine.done[-1] == "pip uninstall shielded"
    assert machine.cache.find(PLAN.key) is None


def test_an_extension_that_does_not_load_ends_it_before_the_training(machine: Machine) -> None:
    machine.problems = (Problem("the extension for torch does not load: undefined symbol", "x"),)
    with pytest.raises(HvdtrainError, match="undefined symbol"):
        machine.install()
    assert "train torch mpi" not in machine.done


def test_what_is_missing_is_said_before_anything_starts(machine: Machine) -> None:
    machine.plan = replace(PLAN, tools=replace(TOOLS, compiler=None, has_python_header=False))
    with pytest.raises(HvdtrainError) as error:
        machine.install()
    assert "C++ compiler" in error.value.message
    assert "Python.h" in error.value.message
    assert "apt-get install g++" in error.value.hint
    assert machine.done == []


def test_an_interrupted_build_leaves_no_wheel_and_no_folder(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(builder: build.Builder, folder: Path) -> Path:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(build.Builder, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.install()
    assert machine.cache.find(PLAN.key) is None
    assert list(tmp_path.glob("hvdtrain-horovod-*")) == []
    assert machine.done == []


def test_no_framework_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.buildinfo, "installed_frameworks", dict)
    with pytest.raises(HvdtrainError, match="no framework") as error:
        install.make_plan(Options(), Recorder(), {})
    assert "pip install torch" in error.value.hint


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("[  3%] Building CXX object third_party/gloo/x.cc.o", 3),
        ("[100%] Built target pytorch", 100),
        ("-- Found MPI", None),
        ("text [ 50%]", None),
    ],
)
def test_percentage_comes_from_the_builds_own_output(line: str, value: int | None) -> None:
    assert parse_percent(line) == value
