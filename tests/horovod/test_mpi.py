"""Which MPI it is, from what its programs print; and whether all parts use the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.horovod.mpi import (
    compiler_conflict,
    conflicts,
    find_mpi,
    launch_environment,
    library_folders,
    parse_compiler,
    parse_launcher,
    parse_library,
    search_folders,
    two_ranks,
)
from tests.horovod.examples import OPEN_MPI

INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\nCopyright 2003-2023, Intel Corporation.\n"
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: Thu Apr  7\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", ("Open MPI", "4.1.8")),
        ("mpirun (Open MPI) 5.0.11\n", ("Open MPI", "5.0.11")),
        ("mpiexec (OpenRTE) 4.1.4\n", ("Open MPI", "4.1.4")),
        (HYDRA, ("MPICH", "4.0.2")),
        (INTEL, ("Intel MPI", "2021.11")),
        ("srun: error", ("", "")),
    ],
)
def test_launcher(text: str, expected: tuple[str, str]) -> None:
    assert parse_launcher(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpicxx: Open MPI 4.1.4 (Language: C++)\n", ("Open MPI", "4.1.4")),
        ("mpicxx for MPICH version 4.0.2\ngcc version 12\n", ("MPICH", "4.0.2")),
        ("mpiicpc for the Intel(R) MPI Library 2021.11 for Linux*\n", ("Intel MPI", "2021.11")),
        ("", ("", "")),
    ],
)
def test_compiler(text: str, expected: tuple[str, str]) -> None:
    assert parse_compiler(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v4.1.8, package: Open MPI user@localhost Distribution, ident: 4.1.8\x00", ("Open MPI", "4.1.8")),
        ("MPICH Version:      4.2.0\nMPICH Release date: ...", ("MPICH", "4.2.0")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", ("Intel MPI", "2021.11")),
    ],
)
def test_library(text: str, expected: tuple[str, str]) -> None:
    assert parse_library(text) == expected


def test_library_folders_come_once_each() -> None:
    show = "c++ -I/e/include -pthread -L/e/lib -L/e/lib -Wl,-rpath -Wl,/e/lib -lmpi -L /x/lib/"
    assert library_folders(show) == ("/e/lib", "/x/lib")


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/env/lib", ("$ORIGIN/../../../..",)),
        ("/opt/mpi/lib", ("/opt/mpi/lib",)),
        ("/usr/lib/x86_64-linux-gnu", ()),
        ("/usr/lib/x86_64-linux-gnu/openmpi/lib", ("/usr/lib/x86_64-linux-gnu/openmpi/lib",)),
    ],
)
def test_an_extension_finds_the_library_without_the_build_environments_paths(folder: str, expected: tuple[str, ...]) -> None:
    mpi = replace(OPEN_MPI, library_folders=(folder,))
    assert search_folders(mpi, "/env/lib/python3.11/site-packages/horovod/torch", prefix="/env") == expected


def test_one_mpi_has_no_conflicts() -> None:
    libraries = {"Horovod": "Open MPI v4.1.8, package", "mpi4py": "Open MPI v4.1.8, package"}
    assert conflicts(OPEN_MPI, libraries, {"horovod.torch": ("/env/lib/libmpi.so.40",)}) == ()


@pytest.mark.parametrize(
    ("libraries", "loaded", "said"),
    [
        (
            {"Horovod": "Open MPI v4.1.4, package"},
            {},
            "Horovod uses Open MPI 4.1.4, but mpirun (/env/bin/mpirun) is of Open MPI 4.1.8",
        ),
        ({"mpi4py": "MPICH Version:      4.2.0"}, {}, "mpi4py uses MPICH 4.2.0"),
        ({}, {"horovod.torch": ("/a/libmpi.so.40", "/b/libmpi.so.12")}, "load different MPI libraries: /a/libmpi.so.40, /b"),
    ],
)
def test_two_mpis_are_told_apart(libraries: dict[str, str], loaded: dict[str, tuple[str, ...]], said: str) -> None:
    (found,) = conflicts(OPEN_MPI, libraries, loaded)
    assert said in found


def _program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_an_mpi_needs_both_its_compiler_and_its_launcher(tmp_path: Path) -> None:
    _program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    assert find_mpi(str(tmp_path)) is None
    _program(tmp_path, "mpicxx", "echo 'c++ -L/m/lib -lmpi'")
    mpi = find_mpi(str(tmp_path))
    assert mpi is not None
    assert (str(mpi), mpi.library_folders) == ("Open MPI 4.1.8", ("/m/lib",))


def test_a_compiler_and_a_launcher_of_two_mpis_are_noticed(tmp_path: Path) -> None:
    _program(tmp_path / "a", "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    _program(tmp_path / "b", "mpicxx", "echo 'mpicxx for MPICH version 4.0.2'")
    mpi = find_mpi(f"{tmp_path}/a:{tmp_path}/b")
    assert mpi is not None
    assert "is of MPICH 4.0.2, but" in compiler_conflict(mpi)


def test_a_trial_run_knows_nothing_of_the_job_around_it() -> None:
    env = launch_environment({"OMPI_COMM_WORLD_RANK": "3", "SLURM_JOB_ID": "7", "PMIX_RANK": "3", "OMPI_MCA_btl": "tcp"}, "/p")
    assert "OMPI_COMM_WORLD_RANK" not in env
    assert "SLURM_JOB_ID" not in env
    assert "PMIX_RANK" not in env
    assert (env["OMPI_MCA_btl"], env["PATH"]) == ("tcp", "/p")


def test_two_ranks_fit_on_a_machine_with_one_core() -> None:
    assert two_ranks(OPEN_MPI)[1:] == ["-np", "2", "--host", "localhost:2", "--bind-to", "none"]
    assert two_ranks(replace(OPEN_MPI, family="MPICH"))[1:] == ["-np", "2"]
