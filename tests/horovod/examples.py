"""Values that several tests start from."""

from __future__ import annotations

from hvdtrain.horovod.frameworks import Framework
from hvdtrain.horovod.gpu import GpuOptions
from hvdtrain.horovod.mpi import Mpi
from hvdtrain.horovod.plan import Plan, PythonFacts
from hvdtrain.horovod.toolchain import Toolchain

TORCH = Framework("torch", "2.13.0+cpu")
TENSORFLOW = Framework("tensorflow", "2.21.0")
OPEN_MPI = Mpi("Open MPI", "4.1.8", "/env/bin/mpirun", "/env/bin/mpicxx", ("/opt/openmpi/lib",))
TOOLS = Toolchain(
    compiler="/usr/bin/c++",
    compiler_version="c++ (Debian 12.2.0-14) 12.2.0",
    cxx_standards=(17, 20),
    make="/usr/bin/make",
    cmake="/usr/bin/cmake",
    cmake_version=(3, 25),
    python_header="/usr/include/python3.11/Python.h",
    has_python_header=True,
    build_folder="/tmp",
    free_disk_bytes=10**10,
    free_memory_bytes=16 * 10**9,
    cpus=8,
)
PYTHON = PythonFacts("cpython-311-x86_64-linux-gnu", "linux-x86_64", "glibc 2.36", "/env/lib/python3.11/site-packages", "/env")
PLAN = Plan((TORCH, TENSORFLOW), OPEN_MPI, TOOLS, GpuOptions(), PYTHON, jobs=2, arch_flags="-mavx -mfma", compiler_variables={})
