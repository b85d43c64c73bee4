"""The state of Horovod in this environment, as a value: what is there, what it was built for, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.horovod import INSTALL_COMMAND, buildinfo
from hvdtrain.horovod.buildinfo import BuildInfo
from hvdtrain.horovod.mpi import Mpi, conflicts, find_mpi, parse_library
from hvdtrain.horovod.probe import Probe, probe_all
from hvdtrain.horovod.shell import search_path


@dataclass(frozen=True)
class Problem:
    """Something wrong, and the command that mends it."""

    what: str
    mend: str


@dataclass(frozen=True)
class FrameworkStatus:
    """One framework beside the extension built for it."""

    name: str
    installed: str | None
    built_for: str | None
    loads: bool
    error: str = ""


@dataclass(frozen=True)
class Status:
    """Everything that ``status`` shows."""

    horovod: str | None
    python: str
    frameworks: tuple[FrameworkStatus, ...] = ()
    mpi: str = ""
    """the MPI library that Horovod uses; empty if it was built without"""
    gloo: bool = False
    nccl: str = ""
    mpirun: str = ""
    mpi4py: str = ""
    built: BuildInfo | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def collect() -> Status:
    """Look at this environment. Starts a process for each extension; about four seconds."""
    folder = buildinfo.package_folder()
    installed = buildinfo.installed_frameworks()
    launcher = find_mpi(search_path())
    info = buildinfo.read_build_info(folder) if folder is not None else None
    present = [name for name in buildinfo.EXTENSIONS if folder is not None and buildinfo.has_extension(folder, name)]
    probes = probe_all([name for name in present if name in installed])
    return judge(info, installed, probes, launcher, _version_or_empty("mpi4py"))


def judge(
    info: BuildInfo | None,
    installed: dict[str, str],
    probes: Sequence[Probe],
    launcher: Mpi | None,
    mpi4py_version: str,
) -> Status:
    """The status that follows from what was found. Pure."""
    by_name = {probe.framework: probe for probe in probes}
    loaded = [probe for probe in probes if not probe.error]
    library = next((" ".join(parse_library(probe.library)) for probe in loaded if probe.mpi), "")
    built_for = info.frameworks if info is not None else {}
    names = [name for name in buildinfo.EXTENSIONS if name in installed or name in built_for]
    frameworks = tuple(_framework(name, installed, built_for.get(name), by_name.get(name)) for name in names)
    mpi4py_library = next((" ".join(parse_library(probe.mpi4py)) for probe in loaded if probe.mpi4py), "")
    return Status(
        horovod=info.horovod if info is not None else None,
        python=platform.python_version(),
        frameworks=frameworks,
        mpi=library,
        gloo=any(probe.gloo for probe in loaded),
        nccl=(info.nccl if info is not None and info.nccl else "yes") if any(probe.nccl for probe in loaded) else "",
        mpirun=f"{launcher} ({launcher.mpirun})" if launcher is not None else "",
        mpi4py=f"{mpi4py_version} ({mpi4py_library})" if mpi4py_library else mpi4py_version,
        built=info,
        problems=tuple(_problems(info, installed, probes, launcher, mpi4py_version)),
    )


def _framework(name: str, installed: dict[str, str], built_for: str | None, probe: Probe | None) -> FrameworkStatus:
    loads = probe is not None and not probe.error
    return FrameworkStatus(name, installed.get(name), built_for, loads, probe.error if probe is not None else "")


def _problems(
    info: BuildInfo | None, installed: dict[str, str], probes: Sequence[Probe], launcher: Mpi | None, mpi4py_version: str
) -> list[Problem]:
    if info is None:
        return [Problem("Horovod is not installed in this environment", INSTALL_COMMAND)]
    found = []
    failed = {probe.framework: probe.error for probe in probes if probe.error}
    for name in buildinfo.EXTENSIONS:
        if name not in installed and name not in info.frameworks:
            continue
        mismatch = buildinfo.mismatch(info, name, installed.get(name)) if info.frameworks or name in installed else ""
        if not info.ours and not info.frameworks and name in {probe.framework for probe in probes}:
            mismatch = ""  # another tool's build without records: whether it loads is all that can be known
        if name in failed:
            reason = f" ({mismatch})" if mismatch else ""
            found.append(
                Problem(f"the extension for {name} does not load{reason}: {failed[name]}", f"{INSTALL_COMMAND} --rebuild")
            )
        elif mismatch:
            found.append(Problem(f"Horovod was {mismatch}" if "built" in mismatch else mismatch, INSTALL_COMMAND))
    loaded = [probe for probe in probes if not probe.error]
    if not probes and not found:
        found.append(Problem("Horovod is built for no framework that is installed", INSTALL_COMMAND))
    found += _mpi_problems(loaded, launcher, mpi4py_version)
    return found


def _mpi_problems(loaded: Sequence[Probe], launcher: Mpi | None, mpi4py_version: str) -> list[Problem]:
    with_mpi = [probe for probe in loaded if probe.mpi]
    if not with_mpi:
        return [Problem("Horovod is built without MPI", f"{INSTALL_COMMAND} --rebuild")] if loaded else []
    found = []
    if launcher is None:
        found.append(Problem("Horovod uses MPI, but there is no mpirun with its mpicxx on PATH", INSTALL_COMMAND))
    first = with_mpi[0]
    libraries = {"Horovod": first.library, **({"mpi4py": first.mpi4py} if first.mpi4py else {})}
    mixed = conflicts(launcher, libraries, {f"horovod.{probe.framework}": probe.libraries for probe in with_mpi})
    for text in mixed:
        mend = (
            "pip install --force-reinstall --no-cache-dir mpi4py"
            if text.startswith("mpi4py")
            else f"{INSTALL_COMMAND} --rebuild"
        )
        found.append(Problem(text, mend))
    if mpi4py_version and first.mpi4py_error:
        found.append(Problem(f"mpi4py cannot be imported: {first.mpi4py_error}", "pip install --force-reinstall mpi4py"))
    return found


def _version_or_empty(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
