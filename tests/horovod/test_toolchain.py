"""What is missing is said at once, all together, with how to get it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.horovod.toolchain import (
    Toolchain,
    architecture_flags,
    find_compiler,
    free_memory_bytes,
    look_for_toolchain,
    missing,
    parallel_jobs,
    read_cpu_flags,
    torch_cxx_standard,
)
from tests.horovod.examples import TOOLS


def test_nothing_is_missing_on_a_complete_machine() -> None:
    assert missing(TOOLS, 20) == ()


@pytest.mark.parametrize(
    ("tools", "standard", "what", "how"),
    [
        (replace(TOOLS, compiler=None), 17, "C++ compiler", "apt-get install g++"),
        (replace(TOOLS, cxx_standards=(17,)), 20, "compiles C++20", "g++ 11"),
        (replace(TOOLS, make=None), 17, "make", "apt-get install make"),
        (replace(TOOLS, has_python_header=False), 17, "/usr/include/python3.11/Python.h is not there", "python3-dev"),
        (replace(TOOLS, free_disk_bytes=10**8), 17, "100 MB free in /tmp, the build needs 700 MB", "TMPDIR"),
        (replace(TOOLS, free_memory_bytes=5 * 10**8), 17, "memory: 500 MB free", "larger machine"),
    ],
    ids=["compiler", "standard", "make", "headers", "disk", "memory"],
)
def test_each_missing_thing_says_how_to_get_it(tools: Toolchain, standard: int, what: str, how: str) -> None:
    (found,) = missing(tools, standard)
    assert what in found.what
    assert how in found.how


def test_all_that_is_missing_comes_together() -> None:
    assert len(missing(Toolchain(), 17)) == 5


@pytest.mark.parametrize(
    ("version", "standard"),
    [("2.13.0+cpu", 17), ("2.14.1", 20), ("2.9.0", 17), ("3.0.0", 20), ("2.14.0a0+git1", 20), (None, 17)],
)
def test_the_standard_follows_the_installed_torch(version: str | None, standard: int) -> None:
    assert torch_cxx_standard(version) == standard


@pytest.mark.parametrize(("cpus", "memory_gb", "jobs"), [(8, 64, 8), (8, 4, 2), (2, 0.5, 1), (64, 16, 10)])
def test_jobs_follow_the_cpus_as_far_as_the_memory_goes(cpus: int, memory_gb: float, jobs: int) -> None:
    assert parallel_jobs(cpus, int(memory_gb * 10**9)) == jobs


def test_vector_options_are_the_cpus(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse avx f16c\n")
    assert architecture_flags(read_cpu_flags(cpuinfo)) == "-mf16c -mavx"
    assert architecture_flags(read_cpu_flags(tmp_path / "none")) == ""


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory_bytes(tmp_path) == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(tmp_path) > 600000


def test_cxx_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mine"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "mine -m64")
    assert find_compiler(str(tmp_path)) == str(compiler)
    monkeypatch.setenv("CXX", "absent")
    assert find_compiler(str(tmp_path)) is None


def test_a_compiler_that_does_not_know_a_standard_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "old 7.5";; *c++20*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    tools = look_for_toolchain(f"{tmp_path}:/usr/bin:/bin")
    assert (tools.compiler, tools.compiler_version, tools.cxx_standards) == (str(compiler), "old 7.5", (17,))


def test_an_old_cmake_is_not_used() -> None:
    assert replace(TOOLS, cmake_version=(3, 10)).usable_cmake is None
    assert TOOLS.usable_cmake == "/usr/bin/cmake"
