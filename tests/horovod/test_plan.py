"""The cache key holds everything that matters and nothing else; the build's environment holds exactly what was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.horovod.gpu import GpuOptions
from hvdtrain.horovod.mpi import Mpi
from hvdtrain.horovod.plan import Plan, build_environment, compiler_variables
from tests.horovod.examples import OPEN_MPI, PLAN, PYTHON, TENSORFLOW, TOOLS, TORCH


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, frameworks=(TORCH,)),
        replace(PLAN, frameworks=(replace(TORCH, version="2.13.1+cpu"), TENSORFLOW)),
        replace(PLAN, frameworks=(replace(TORCH, cxx11_abi=False), TENSORFLOW)),
        replace(PLAN, frameworks=(replace(TORCH, cuda="13.0"), TENSORFLOW)),
        replace(PLAN, mpi=replace(OPEN_MPI, version="5.0.1")),
        replace(PLAN, mpi=replace(OPEN_MPI, family="MPICH")),
        replace(PLAN, mpi=replace(OPEN_MPI, library_folders=("/opt/other/lib",))),
        replace(PLAN, tools=replace(TOOLS, compiler_version="g++ 13")),
        replace(PLAN, python=replace(PYTHON, abi="cpython-312-x86_64-linux-gnu")),
        replace(PLAN, python=replace(PYTHON, libc="glibc 2.31")),
        replace(PLAN, arch_flags="-mavx"),
        replace(PLAN, gpu=GpuOptions({"HOROVOD_GPU_OPERATIONS": "NCCL"})),
        replace(PLAN, gpu=GpuOptions(nccl="2.27.3")),
        replace(PLAN, compiler_variables={"CXXFLAGS": "-O1"}),
    ],
)
def test_what_matters_changes_the_key(other: Plan) -> None:
    assert other.key != PLAN.key


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, jobs=7),
        replace(PLAN, tools=replace(TOOLS, free_disk_bytes=5, cpus=1, cmake=None)),
        replace(PLAN, mpi=replace(OPEN_MPI, mpirun="/elsewhere/mpirun")),
    ],
)
def test_what_does_not_matter_leaves_the_key(other: Plan) -> None:
    assert other.key == PLAN.key


def test_two_environments_of_one_layout_share_a_wheel() -> None:
    keys = set()
    for prefix in ("/home/ada/one", "/srv/two"):
        mpi = Mpi("Open MPI", "4.1.8", f"{prefix}/bin/mpirun", f"{prefix}/bin/mpicxx", (f"{prefix}/lib",))
        plan = replace(
            PLAN, mpi=mpi, python=replace(PYTHON, prefix=prefix, site_folder=f"{prefix}/lib/python3.11/site-packages")
        )
        assert plan.search_folders[0] == "$ORIGIN/../../../.."
        keys.add(plan.key)
    assert len(keys) == 1


def test_the_environment_names_exactly_the_planned_frameworks() -> None:
    base = {"PATH": "/usr/bin", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_GLOO": "1", "MAKEFLAGS": "-k --jobserver=3,4"}
    plan = replace(PLAN, frameworks=(TORCH,))
    env = build_environment(plan, base, path="/env/bin", tools_folder=Path("/t"), nccl_home=Path("/n"), cmake="/usr/bin/cmake")
    switches = {name: value for name, value in env.items() if name.startswith("HOROVOD_")}
    assert switches == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CMAKE": "/usr/bin/cmake",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mfma",
    }
    assert env["MAKEFLAGS"] == "-j2"
    assert env["LDFLAGS"] == "-s"
    assert env["CXX"] == "/usr/bin/c++"
    assert env["PYTHONPATH"] == "/t"
    assert env["HVDTRAIN_RPATH"] == "/opt/openmpi/lib;$ORIGIN/../../torch/lib"


def test_the_users_compiler_settings_stay() -> None:
    base = {"PATH": "/usr/bin", "CXX": "clang++", "LDFLAGS": "-L/x", "PYTHONPATH": "/p"}
    env = build_environment(PLAN, base, path="/b", tools_folder=Path("/t"), nccl_home=Path("/n"), cmake="cmake")
    assert (env["CXX"], env["LDFLAGS"], env["PYTHONPATH"]) == ("clang++", "-L/x -s", "/t:/p")


def test_compiler_variables_are_the_ones_that_change_the_result() -> None:
    assert compiler_variables({"CXXFLAGS": "-O1", "HOME": "/root", "LDFLAGS": ""}) == {"CXXFLAGS": "-O1"}


def test_common_objects_are_shared_by_one_abi_without_gpus() -> None:
    assert PLAN.source.share_common
    assert not replace(PLAN, gpu=GpuOptions({"HOROVOD_GPU_OPERATIONS": "NCCL"})).source.share_common
    assert not replace(PLAN, frameworks=(replace(TORCH, cxx11_abi=False), TENSORFLOW)).source.share_common


def test_a_build_without_gpu_options_does_not_see_the_cuda_toolkit() -> None:
    base = {"PATH": "/usr/bin", "HOROVOD_CUDA_HOME": "/c"}
    env = build_environment(PLAN, base, path="/b", tools_folder=Path("/t"), nccl_home=Path("/n"), cmake="cmake")
    assert "HOROVOD_CUDA_HOME" not in env


def test_the_record_in_the_wheel_says_what_it_was_built_for() -> None:
    info = PLAN.build_info()
    assert dict(info.frameworks) == {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
    assert (info.mpi, info.key, info.cxx_standard) == ("Open MPI 4.1.8", PLAN.key, 17)
    assert type(info).from_json(info.to_json()) == info
