"""What is known of the machine and the software that a measurement hangs on."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from importlib import metadata
from pathlib import Path

import psutil

from hvdtrain.bench.results import Setup
from hvdtrain.comm import Communicator

_PACKAGES = ("hvdtrain", "numpy", "mpi4py", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras")


def setup(comm: Communicator, mpi: str = "") -> Setup:
    """Collective. Of this job; ``mpi`` names its MPI."""
    return Setup(
        time=time.time(),
        hosts=tuple(comm.allgather(socket.gethostname(), name="bench/hosts")),
        launcher=comm.world.source,
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        threads=int(os.environ.get("OMP_NUM_THREADS") or 0),
        versions=_versions() | ({"mpi": mpi} if mpi else {}),
    )


def free_bytes() -> int:
    """What this host's processes can still take."""
    return int(psutil.virtual_memory().available)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "linux": platform.release()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
