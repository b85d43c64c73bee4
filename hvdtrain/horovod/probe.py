"""Imports each extension in a process of its own and reports what it can do, or the loader's own words.

This finds what records cannot: an undefined symbol after a framework was upgraded under Horovod, or a second MPI library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdtrain.horovod.frameworks import last_line
from hvdtrain.horovod.shell import Result, run

_SCRIPT = """
import ctypes, importlib, json, os, sys
try:
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
except ImportError:
    pass
hvd = importlib.import_module("horovod." + sys.argv[1])
answer = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl", "cuda")}

def libraries():
    with open("/proc/self/maps") as maps:
        files = {line.split(None, 5)[5].strip() for line in maps if "/libmp" in line}
    return sorted(os.path.realpath(file) for file in files if os.path.basename(file).startswith(("libmpi.so", "libmpich.so")))

def version(file):
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(file).MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace")

own = libraries()
answer["library"] = version(own[0]) if own else ""
try:
    from mpi4py import MPI
    answer["mpi4py"] = MPI.Get_library_version()
except Exception as error:
    answer["mpi4py_error"] = f"{type(error).__name__}: {error}"
answer["libraries"] = libraries()
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Probe:
    """What one extension said when it was imported. ``error`` is empty if it loads."""

    framework: str
    error: str = ""
    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    library: str = ""
    """the MPI library's own description of itself"""
    libraries: tuple[str, ...] = ()
    """the files of MPI libraries that Horovod and mpi4py together load"""
    mpi4py: str = ""
    mpi4py_error: str = ""


def probe_all(frameworks: Sequence[str]) -> tuple[Probe, ...]:
    """Import the extensions of these frameworks, side by side; about four seconds."""
    with ThreadPoolExecutor(max_workers=max(1, len(frameworks))) as pool:
        return tuple(pool.map(probe, frameworks))


def probe(framework: str) -> Probe:
    """Import one extension. -P: a folder in the current directory that is named like a package does not count."""
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    return read(framework, run([sys.executable, "-P", "-c", _SCRIPT, framework], env=env, timeout_s=300, apart=True))


def read(framework: str, result: Result) -> Probe:
    """A probe's result from what its process printed."""
    if not result.ok:
        return Probe(framework, error=_loader_error(result.errors) or f"exit code {result.code}")
    answer = json.loads(last_line(result.output))
    return Probe(
        framework,
        mpi=answer["mpi"],
        gloo=answer["gloo"],
        nccl=answer["nccl"],
        library=answer["library"],
        libraries=tuple(answer["libraries"]),
        mpi4py=answer.get("mpi4py", ""),
        mpi4py_error=answer.get("mpi4py_error", ""),
    )


def _loader_error(text: str) -> str:
    """The line that names the cause: a loader error wherever it stands, else the last line."""
    for line in text.splitlines():
        if "undefined symbol" in line or "cannot open shared object" in line or "version `" in line:
            return line.strip()
    return last_line(text)
