"""The one line that matters, out of real logs."""

from __future__ import annotations

import pytest

from hvdtrain.horovod.diagnose import first_error

COMPILER = """\
[ 12%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
/x/horovod/common/half.h:76:11: warning: dereferencing type-punned pointer [-Wstrict-aliasing]
In file included from /x/horovod/torch/adapter_v2.cc:17:
/env/torch/include/ATen/core/TensorBase.h:4:2: error: #error You need C++17 to compile PyTorch
/env/torch/include/c10/util/C++17.h:27:2: error: #error "You need C++17 or later to compile PyTorch"
gmake[2]: *** [horovod/torch/CMakeFiles/pytorch.dir/build.make:76: adapter_v2.cc.o] Error 1
subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
"""
XLA = """\
/x/horovod/tensorflow/xla_mpi_ops.cc:24:10: fatal error: tensorflow/compiler/xla/client/xla_builder.h: No such file or directory
compilation terminated.
"""
CMAKE = """\
-- Could NOT find MPI_CXX (missing: MPI_CXX_WORKS)
CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
  Could NOT find MPI (missing: MPI_CXX_FOUND)
      Reason given by package: nothing works

Call Stack (most recent call first):
  CMakeLists.txt:133 (find_package)
"""
CMAKE_COMPILER = """\
CMake Error at /usr/share/cmake-3.25/Modules/CMakeTestCXXCompiler.cmake:63 (message):
  The C++ compiler

    "/usr/bin/c++"

  is not able to compile a simple test program.

  It fails with the following output:

    Change Dir: /tmp/x/CMakeFiles/CMakeScratch/TryCompile-uq5Yqo
    cc1plus: fatal error: nothere.h: No such file or directory

CMake will not be able to correctly generate this project.
"""
KILLED = """\
/x/mpi_ops.cc:12:1: error: expected declaration
c++: fatal error: Killed signal terminated program cc1plus
"""
DISK = "/tmp/ccX.s: Fatal error: can't write 12 bytes to section .text: 'No space left on device'\n"
PIP = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/horovod/
ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from versions: none)
ERROR: No matching distribution found for horovod==0.28.1
"""
LINK = "/usr/bin/ld: cannot find -lmpi_cxx: No such file or directory\ncollect2: error: ld returned 1 exit status\n"
MANAGED = "error: externally-managed-environment\n\nx This environment is externally managed\n"


@pytest.mark.parametrize(
    ("log", "error", "hint"),
    [
        (COMPILER, "#error You need C++17 to compile PyTorch", "PyTorch"),
        (XLA, "xla_mpi_ops.cc:24:10: fatal error", "TensorFlow may be too new"),
        (CMAKE, "Could NOT find MPI (missing: MPI_CXX_FOUND) Reason given by package: nothing works", "libopenmpi-dev"),
        (CMAKE_COMPILER, "is not able to compile a simple test program. cc1plus: fatal error: nothere.h", ""),
        (KILLED, "Killed signal terminated program", "--jobs 1"),
        (DISK, "No space left on device", "TMPDIR"),
        (PIP, "Could not find a version", "package index"),
        (LINK, "cannot find -lmpi_cxx", "library"),
        (MANAGED, "externally-managed-environment", "virtual environment"),
        ("/usr/bin/python: No module named pip\n", "No module named pip", "ensurepip"),
        ("x.cc:1:10: fatal error: Python.h: No such file or directory\n", "Python.h", "python3-dev"),
        ("step one\nstep two\n", "step two", ""),
        ("", "no output", ""),
    ],
    ids=[
        "c++17",
        "xla",
        "cmake",
        "cmake-compiler",
        "memory",
        "disk",
        "pip",
        "link",
        "managed",
        "no-pip",
        "headers",
        "nothing-known",
        "empty",
    ],
)
def test_first_error(log: str, error: str, hint: str) -> None:
    diagnosis = first_error(log.splitlines())
    assert error in diagnosis.error
    assert hint in diagnosis.hint
    assert "\n" not in diagnosis.error


def test_a_monstrous_line_is_cut() -> None:
    assert len(first_error([f"a.cc:1:1: error: {'x' * 5000}"]).error) < 500
