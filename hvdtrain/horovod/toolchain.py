"""What building needs, looked for before anything long starts: compiler, make, CMake, Python's headers, disk and memory.

``look_for_toolchain`` asks the machine; ``missing`` and ``parallel_jobs`` are pure functions of the answers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Free space that a build needs in its temporary folder (source 70 MB, objects 60 MB, wheel; CMake 100 MB), with a margin.
BUILD_DISK_BYTES = 700 * 10**6
#: Memory that one compiler process needs at its peak (TensorFlow's and PyTorch's headers), with a margin.
JOB_MEMORY_BYTES = 1500 * 10**6
#: Below this even one compiler process is likely to be killed.
LEAST_MEMORY_BYTES = 1000 * 10**6
#: The oldest CMake that the changed sources were built with.
LEAST_CMAKE = (3, 16)

_PROBES = {17: "#include <optional>\nint main() { std::optional<int> x; return x.has_value(); }\n"}
_PROBES[20] = "#include <compare>\nint main() { return (1 <=> 2) == std::strong_ordering::less ? 0 : 1; }\n"


@dataclass(frozen=True)
class Toolchain:
    """The tools and room that were found; None or 0 where there is none."""

    compiler: str | None = None
    """path of the C++ compiler"""
    compiler_version: str = ""
    cxx_standards: tuple[int, ...] = ()
    """the standards of 17 and 20 that the compiler accepted in a trial"""
    make: str | None = None
    cmake: str | None = None
    cmake_version: tuple[int, ...] = ()
    python_header: str = ""
    has_python_header: bool = False
    build_folder: str = ""
    free_disk_bytes: int = 0
    free_memory_bytes: int = 0
    cpus: int = 1

    @property
    def usable_cmake(self) -> str | None:
        """The system's CMake where it is new enough; else the package index has one."""
        return self.cmake if self.cmake_version >= LEAST_CMAKE else None


@dataclass(frozen=True)
class Missing:
    """One thing that a build lacks, and how to get it."""

    what: str
    how: str


def torch_cxx_standard(torch_version: str | None) -> int:
    """The C++ standard that the headers of an installed PyTorch need: 20 from 2.14, 17 before."""
    match = re.match(r"(\d+)\.(\d+)", torch_version or "")
    return 20 if match and (int(match[1]), int(match[2])) >= (2, 14) else 17


def missing(tools: Toolchain, cxx_standard: int) -> tuple[Missing, ...]:
    """Everything that a build lacks, together."""
    found: list[Missing] = []
    if tools.compiler is None:
        found.append(Missing("a C++ compiler (g++ or clang++) on PATH, or CXX naming one", _packages("g++", "gcc-c++", "gxx")))
    elif cxx_standard not in tools.cxx_standards:
        what = f"a C++ compiler that compiles C++{cxx_standard}: {tools.compiler} {tools.compiler_version} does not"
        least = "g++ 11" if cxx_standard >= 20 else "g++ 9"
        found.append(Missing(what, f"install {least} or later ({_packages('g++', 'gcc-c++', 'gxx')}) or set CXX to one"))
    if tools.make is None:
        found.append(Missing("make on PATH", _packages("make", "make", "make")))
    if not tools.has_python_header:
        what = f"Python's C headers: {tools.python_header} is not there"
        found.append(Missing(what, _packages("python3-dev", "python3-devel", "python")))
    if tools.free_disk_bytes < BUILD_DISK_BYTES:
        what = f"disk space: {_mb(tools.free_disk_bytes)} free in {tools.build_folder}, the build needs {_mb(BUILD_DISK_BYTES)}"
        found.append(Missing(what, "make room there, or set TMPDIR to a folder on a larger disk"))
    if tools.free_memory_bytes < LEAST_MEMORY_BYTES:
        what = f"memory: {_mb(tools.free_memory_bytes)} free, one compiler process needs about {_mb(JOB_MEMORY_BYTES)}"
        found.append(Missing(what, "end other programs, or build on a larger machine (the cache folder can be shared)"))
    return tuple(found)


def parallel_jobs(cpus: int, free_memory_bytes: int) -> int:
    """How many compiler processes to run: one per CPU, as far as the memory goes."""
    return max(1, min(cpus, free_memory_bytes // JOB_MEMORY_BYTES))


def architecture_flags(cpu_flags: Sequence[str]) -> str:
    """The vector options that this CPU supports, of the three that Horovod's half-precision sums use."""
    return " ".join(f"-m{flag}" for flag in ("f16c", "avx", "fma") if flag in cpu_flags)


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """This machine's CPU flags as Linux names them; empty where there is no such file."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    match = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return tuple(match[1].split()) if match else ()


def look_for_toolchain(path: str, build_folder: Path | None = None) -> Toolchain:
    """Ask this machine; ``path`` is the PATH to search. Takes about a second (two trial compilations)."""
    compiler = find_compiler(path)
    cmake = shutil.which(os.environ.get("HOROVOD_CMAKE", "cmake"), path=path)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    folder = build_folder or Path(tempfile.gettempdir())
    return Toolchain(
        compiler=compiler,
        compiler_version=compiler_version(compiler) if compiler else "",
        cxx_standards=tuple(standard for standard in _PROBES if compiler and _compiles(compiler, standard)),
        make=shutil.which("make", path=path) or shutil.which("gmake", path=path),
        cmake=cmake,
        cmake_version=_cmake_version(cmake) if cmake else (),
        python_header=str(header),
        has_python_header=header.is_file(),
        build_folder=str(folder),
        free_disk_bytes=shutil.disk_usage(folder).free,
        free_memory_bytes=free_memory_bytes(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def find_compiler(path: str) -> str | None:
    """The C++ compiler that CMake would take: CXX, else the first of the usual names."""
    named = os.environ.get("CXX", "").split()
    for name in named[:1] or ["c++", "g++", "clang++"]:
        found = shutil.which(name, path=path)
        if found is not None:
            return found
    return None


def compiler_version(compiler: str) -> str:
    """The first line of what the compiler says about itself."""
    return _output([compiler, "--version"]).partition("\n")[0].strip()


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What is left for new processes: the machine's free memory, or the container's limit where that is tighter."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        return available if limit == "max" else min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        return available


def _compiles(compiler: str, standard: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="hvdtrain-probe-") as folder:
        source = Path(folder, "probe.cc")
        source.write_text(_PROBES[standard], encoding="ascii")
        command = [compiler, f"-std=c++{standard}", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _cmake_version(cmake: str) -> tuple[int, ...]:
    match = re.search(r"version (\d+)\.(\d+)", _output([cmake, "--version"]))
    return (int(match[1]), int(match[2])) if match else ()


def _output(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


def _packages(debian: str, fedora: str, conda: str) -> str:
    return f"Debian/Ubuntu: apt-get install {debian}; Fedora: dnf install {fedora}; conda: conda install -c conda-forge {conda}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
