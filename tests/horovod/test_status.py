"""What ``status`` concludes from what was found."""

from __future__ import annotations

import json

import pytest

from hvdtrain.horovod.buildinfo import BuildInfo
from hvdtrain.horovod.mpi import Mpi
from hvdtrain.horovod.probe import Probe, read
from hvdtrain.horovod.shell import Result
from hvdtrain.horovod.status import judge
from tests.horovod.examples import OPEN_MPI

LIBRARY = "Open MPI v4.1.8, package: Open MPI user@localhost Distribution"
FILES = ("/env/lib/libmpi.so.40",)
BOTH = BuildInfo("0.28.1", {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}, key="k")
INSTALLED = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
TORCH = Probe("torch", mpi=True, gloo=True, library=LIBRARY, libraries=FILES, mpi4py=LIBRARY)
TENSORFLOW = Probe("tensorflow", mpi=True, gloo=True, library=LIBRARY, libraries=FILES, mpi4py=LIBRARY)


def test_a_sound_installation_has_no_problems() -> None:
    state = judge(BOTH, INSTALLED, [TORCH, TENSORFLOW], OPEN_MPI, "4.1.2")
    assert state.problems == ()
    assert (state.mpi, state.gloo, state.nccl) == ("Open MPI 4.1.8", True, "")
    assert state.mpi4py == "4.1.2 (Open MPI 4.1.8)"
    assert [framework.loads for framework in state.frameworks] == [True, True]


@pytest.mark.parametrize(
    ("info", "installed", "probes", "launcher", "what", "mend"),
    [
        (None, INSTALLED, [], OPEN_MPI, "not installed in this environment", "hvdtrain horovod install"),
        (
            BOTH,
            {**INSTALLED, "torch": "2.14.1"},
            [Probe("torch", error="ImportError: mpi_lib_v2.so: undefined symbol: _ZN3c10"), TENSORFLOW],
            OPEN_MPI,
            "torch does not load (built for torch 2.13.0+cpu, but 2.14.1 is installed): ImportError: mpi_lib_v2.so: undefined symbol",
            "hvdtrain horovod install --rebuild",
        ),
        (
            BOTH,
            {**INSTALLED, "torch": "2.13.1+cpu"},
            [TORCH, TENSORFLOW],
            OPEN_MPI,
            "Horovod was built for torch 2.13.0+cpu, but 2.13.1+cpu is installed",
            "hvdtrain horovod install",
        ),
        (
            BuildInfo("0.28.1", {"torch": "2.13.0+cpu"}),
            INSTALLED,
            [TORCH],
            OPEN_MPI,
            "Horovod was not built for tensorflow 2.21.0",
            "hvdtrain horovod install",
        ),
        (
            BOTH,
            {"torch": "2.13.0+cpu"},
            [TORCH],
            OPEN_MPI,
            "tensorflow 2.21.0, which is not installed",
            "hvdtrain horovod install",
        ),
        (BOTH, INSTALLED, [TORCH, TENSORFLOW], None, "no mpirun", "hvdtrain horovod install"),
        (
            BOTH,
            INSTALLED,
            [TORCH, TENSORFLOW],
            Mpi("MPICH", "4.2.0", "/usr/bin/mpirun", "/usr/bin/mpicxx"),
            "Horovod uses Open MPI 4.1.8, but mpirun (/usr/bin/mpirun) is of MPICH 4.2.0",
            "hvdtrain horovod install --rebuild",
        ),
        (
            BuildInfo("0.28.1", {"torch": "2.13.0+cpu"}),
            {"torch": "2.13.0+cpu"},
            [Probe("torch", gloo=True)],
            OPEN_MPI,
            "built without MPI",
            "hvdtrain horovod install --rebuild",
        ),
    ],
    ids=["none", "loader-error", "other-version", "not-built", "framework-gone", "no-mpirun", "other-mpirun", "no-mpi"],
)
def test_a_problem_names_its_cause_and_the_command_that_mends_it(
    info: BuildInfo | None, installed: dict[str, str], probes: list[Probe], launcher: Mpi | None, what: str, mend: str
) -> None:
    first = judge(info, installed, probes, launcher, "4.1.2").problems[0]
    assert what in first.what
    assert mend == first.mend


def test_mpi4py_of_another_mpi_is_a_problem() -> None:
    probe = Probe("torch", mpi=True, gloo=True, library=LIBRARY, libraries=FILES, mpi4py="MPICH Version:      4.2.0")
    state = judge(BuildInfo("0.28.1", {"torch": "2.13.0"}), {"torch": "2.13.0"}, [probe], OPEN_MPI, "4.1.2")
    (problem,) = state.problems
    assert "mpi4py uses MPICH 4.2.0" in problem.what
    assert problem.mend.endswith("mpi4py")


def test_another_tools_build_without_records_is_judged_by_loading_it() -> None:
    info = BuildInfo("0.28.1", {}, ours=False)
    assert judge(info, {"torch": "2.13.0"}, [TORCH], OPEN_MPI, "4.1.2").problems == ()


def test_a_probe_reports_what_the_extension_said() -> None:
    answer = {
        "mpi": True,
        "gloo": True,
        "nccl": False,
        "cuda": False,
        "library": LIBRARY,
        "libraries": list(FILES),
        "mpi4py": LIBRARY,
    }
    assert read("torch", Result(0, f"a framework's chatter\n{json.dumps(answer)}\n")) == TORCH


def test_a_probe_that_fails_reports_the_loaders_words() -> None:
    errors = (
        "Traceback ...\nImportError: /x/mpi_lib_v2.so: undefined symbol: _ZN3c104impl\nduring handling of which\nother: y\n"
    )
    assert "undefined symbol: _ZN3c104impl" in read("torch", Result(1, "", errors)).error
    assert read("torch", Result(-11, "", "")).error == "exit code -11"
