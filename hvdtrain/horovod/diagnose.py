"""From a long log to the one line that matters, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """The first real error of a log, with a hint (empty if none is known)."""

    error: str
    hint: str = ""


_MEMORY = "memory ran out: run again with '--jobs 1', or end other programs"
_DISK = "the disk is full: make room, or set TMPDIR to a folder on a larger disk"

#: Causes that explain whatever else the log says, wherever they stand in it.
_OVERRIDING = (
    (r"No space left on device", _DISK),
    (r"Killed signal terminated program|fatal error: Killed|virtual memory exhausted|out of memory allocating", _MEMORY),
)

#: What an error line looks like, the most telling first where two match one line.
_ERRORS = (
    r"^.*?:\d+(?::\d+)?: (?:fatal )?error: .*$",
    r"^#error .*$",
    r"^CMake Error\b.*$",
    r"^.*undefined reference to .*$",
    r"^.*\bld: cannot find .*$",
    r"^(?:c\+\+|g\+\+|clang\+\+|nvcc|cc1plus)\b.*(?:fatal )?error:? .*$",
    r"^nvcc fatal\s*:.*$",
    r"^(?:\w+\.)*\w*(?:Error|Exception): .*$",
    r"^(?:ERROR|error): .*$",
)

_OLD = "the compiler or the C++ standard is too old: install g++ 11 or later, or set CXX"
_HEADERS = "Python's headers are missing (Debian/Ubuntu: apt-get install python3-dev)"
_MPI = "the MPI has no compiler files (Debian/Ubuntu: apt-get install libopenmpi-dev)"
_NCCL = "NCCL was not found: set HOROVOD_NCCL_HOME, or run again with '--gpu off'"
_CUDA = "the CUDA part does not build: run again with '--gpu off', or set HOROVOD_CUDA_HOME to another toolkit"
_INDEX = "the package index has no such version: check pip's index settings"
_NETWORK = "the package index cannot be reached: check the network, the proxy and pip's index settings"
_MANAGED = "make a virtual environment (python3 -m venv .venv) and install there"
_RIGHTS = "use an environment that you may write to (python3 -m venv .venv)"
_NO_PIP = "this environment has no pip: run 'python -m ensurepip'"
_LINK = "a library does not fit the compiler or the frameworks: reinstall the frameworks, or try another compiler (CXX)"
_NEW_TENSORFLOW = "this TensorFlow may be too new for Horovod 0.28.1: known to build is 2.21"
_NEW_TORCH = "this PyTorch may be too new for Horovod 0.28.1: known to build are 2.13 and 2.14"

_HINTS = (
    (r"C\+\+17 or later|C\+\+20 or later|strong_ordering", _OLD),
    (r"Python\.h: No such file", _HEADERS),
    (r"mpi\.h: No such file|Could NOT find MPI", _MPI),
    (r"nccl\.h|Could NOT find NCCL", _NCCL),
    (r"nvcc|cuda|CUDA", _CUDA),
    (r"Connection|name resolution|Max retries|ProxyError|SSLError", _NETWORK),
    (r"No matching distribution|Could not find a version", _INDEX),
    (r"externally-managed-environment", _MANAGED),
    (r"Permission denied", _RIGHTS),
    (r"No module named pip", _NO_PIP),
    (r"undefined reference|cannot find -l", _LINK),
    (r"tensorflow/|horovod/tensorflow", _NEW_TENSORFLOW),
    (r"torch/", _NEW_TORCH),
)


def first_error(lines: Sequence[str]) -> Diagnosis:
    """The first real error; the last line that says something if nothing looks like an error."""
    for pattern, hint in _OVERRIDING:
        for line in lines:
            if re.search(pattern, line):
                return Diagnosis(line.strip(), hint)
    for number, line in enumerate(lines):
        if any(re.match(pattern, line.strip()) for pattern in _ERRORS):
            return _diagnose(_with_continuation(lines, number))
    said = [line.strip() for line in lines if line.strip()]
    return _diagnose(said[-1] if said else "no output")


def _with_continuation(lines: Sequence[str], number: int) -> str:
    """A CMake error says what is wrong in the indented lines below it; a compiler does so on the line itself."""
    first = lines[number].strip()
    if not first.startswith("CMake Error"):
        return _shorten(first)
    below: list[str] = []
    for line in lines[number + 1 : number + 40]:
        if line.strip() and not line.startswith(" "):
            break
        if line.strip():
            below.append(line.strip())
    compiler = [line for line in below[3:] if re.search(r"\berror: ", line)]
    return _shorten(" ".join([first, *below[:3], *compiler[:1]]))


def _shorten(line: str, length: int = 400) -> str:
    return line if len(line) <= length else f"{line[:length]} ..."


def _diagnose(error: str) -> Diagnosis:
    for pattern, hint in _HINTS:
        if re.search(pattern, error):
            return Diagnosis(error, hint)
    return Diagnosis(error)
