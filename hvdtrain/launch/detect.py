"""What there is to start a job with on this machine, looked up once; and which of it to use, with the reason."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch import Job, Launcher, allocation, start_argv
from hvdtrain.launch.horovodrun import Horovodrun
from hvdtrain.launch.hydra import Hydra
from hvdtrain.launch.jsrun import Jsrun
from hvdtrain.launch.local import Local
from hvdtrain.launch.mpi import Mpi, parse_version
from hvdtrain.launch.mpirun import OpenMpi
from hvdtrain.launch.srun import Srun, knows_overlap, parse_pmi_list

#: Launchers of batch systems, which have names of their own for all hosts.
BATCH = ("srun", "jsrun")
LAUNCHERS = ("horovodrun", "mpirun", *BATCH, "local")

#: Variables that name the user's own way to other hosts, in place of ssh (Kubernetes).
_AGENTS = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")

_GET_MPI = "hvdtrain horovod install brings one; or pip install 'openmpi>=4.1.8,<5' mpi4py"


@dataclass(frozen=True)
class Found:
    """The facts. ``problem`` says why an mpirun that is there cannot be used, ``srun_problem`` that of an srun. ``system`` is the
    batch system we run under, ``allocated`` are the hosts of its job, ``home`` is for a shell that names none."""

    environ: Mapping[str, str] = field(default_factory=dict)
    mpi: Mpi | None = None
    problem: str = ""
    horovodrun: str = ""
    srun: str = ""
    pmi: str = ""
    overlap: bool = False
    srun_problem: str = ""
    jsrun: str = ""
    allocated: tuple[str, ...] = ()
    ssh: str = ""
    system: str = ""
    root: bool = False
    home: str = ""
    python: str = sys.executable


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


def own_names() -> frozenset[str]:
    """This machine's name as it is and without its domain, in small letters."""
    name = os.uname().nodename.lower()
    return frozenset({name, name.partition(".")[0]})


def own_user() -> str:
    """Who we are; a number where the machine has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def look(environ: Mapping[str, str]) -> Found:
    """Look at this machine."""
    mpi, problem = None, ""
    home = "" if environ.get("HOME") else os.path.expanduser(f"~{own_user()}")  # Open MPI 5 ends without it
    home = "/" if home.startswith("~") else home
    environ = {**environ, **({"HOME": home} if home else {})}
    mpirun = find("mpirun", environ)
    if mpirun:
        try:
            mpi = _ask_mpi(mpirun, environ)
        except HvdtrainError as error:
            problem = error.message
    system = "slurm" if environ.get("SLURM_JOB_ID") else "lsf" if environ.get("LSB_JOBID") else ""
    srun = shutil.which("srun", path=environ.get("PATH")) or ""
    pmi, overlap, srun_problem = "", False, ""
    if srun and system == "slurm":
        try:
            pmi = parse_pmi_list(_ask(srun, "--mpi=list", environ), mpi.kind if mpi else "openmpi")
            overlap = bool(environ.get("SLURM_STEP_ID")) and knows_overlap(_ask(srun, "--version", environ))
        except HvdtrainError as error:
            pmi, srun_problem = "", error.message
    return Found(
        environ=environ,
        mpi=mpi,
        problem=problem,
        horovodrun=find("horovodrun", environ),
        srun=srun,
        pmi=pmi,
        overlap=overlap,
        srun_problem=srun_problem,
        jsrun=shutil.which("jsrun", path=environ.get("PATH")) or "",
        allocated=_allocated(environ) if system else (),
        ssh=shutil.which("ssh", path=environ.get("PATH")) or "",
        system=system,
        root=os.geteuid() == 0,
        home=home,
    )


def _ask(program: str, option: str, environ: Mapping[str, str]) -> str:
    """What it prints. HvdtrainError if it does not start, or does not end."""
    try:
        done = subprocess.run(
            [program, option], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, env=environ, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdtrainError(f"'{program} {option}' failed: {error}") from None
    return done.stdout + done.stderr


def _allocated(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the batch job's hosts; empty where they cannot be told, which is no matter where the user names hosts."""
    try:
        listed = allocation.from_environment(environ)
    except HvdtrainError:
        return ()
    return tuple(host.name for host in listed.hosts) if listed else ()


def _ask_mpi(mpirun: str, environ: Mapping[str, str]) -> Mpi:
    folder = Path(mpirun).parent
    env = {**environ, "PATH": f"{folder}:{environ.get('PATH', '')}"}  # Intel's mpirun is a script that looks for its other half
    mpi = parse_version(_ask(mpirun, "--version", env), mpirun, str(folder.parent))
    if mpi.kind == "intel" and os.access(folder / "mpiexec.hydra", os.X_OK):
        return replace(mpi, mpirun=str(folder / "mpiexec.hydra"))  # the script would not pass a signal on to it
    return mpi


def choose(name: str, found: Found, job: Job) -> Choice:
    """The launcher of this name, or the best one for ``auto``. Pure.

    Raises:
        HvdtrainError: there is none, or the one that was asked for is not there.
    """
    if _is_outside(found, job):  # of a batch job that is over, for all that we know
        mpi = replace(found.mpi, alone=True) if found.mpi is not None else None
        found = replace(found, mpi=mpi, system="")
    return _named(name, found, "asked for with --launcher") if name != "auto" else _best(found, job)


def _is_outside(found: Found, job: Job) -> bool:
    """Whether the user names hosts that the batch job has not. Names may be with or without their domain."""
    allocated = {name.lower().partition(".")[0] for name in found.allocated}
    return bool(allocated) and not all(host.name.lower().partition(".")[0] in allocated for host in job.hosts)


def uses_ssh(choice: Choice, found: Found, job: Job) -> bool:
    """Whether other hosts will be reached by ssh: not in a batch job, and not through an agent of the user's (Kubernetes)."""
    agent = any(found.environ.get(name) for name in _AGENTS)
    return (
        job.is_remote
        and choice.launcher.name in ("horovodrun", "mpirun")
        and not (found.system and not _is_outside(found, job))
        and not agent
        and job.elastic is None
    )


def _best(found: Found, job: Job) -> Choice:
    if job.elastic is not None:
        return _named("horovodrun", found, "only Horovod's own launcher is elastic")
    if job.controller == "gloo":
        if not job.is_remote and len(job.hosts) == 1:
            return _named("local", found, "Gloo on this machine alone needs no launcher")
        return _named("horovodrun", found, "Gloo on several hosts")
    if found.system == "slurm" and found.srun and found.pmi:
        return _named("srun", found, f"inside a Slurm job, with {found.pmi}")
    if found.system == "lsf" and found.jsrun:
        return _named("jsrun", found, "inside an LSF job")
    if found.mpi is not None:
        return _named("mpirun", found, f"{found.mpi} is here, and starts faster than horovodrun")
    why = found.problem or "no mpirun beside this Python or on PATH"
    raise HvdtrainError(
        f"no launcher for MPI: {why}",
        _GET_MPI,
    )


def _named(name: str, found: Found, reason: str) -> Choice:
    launcher = _build(name, found)
    if launcher is None or launcher.unavailable_reason():
        why = launcher.unavailable_reason() if launcher else found.problem or "no mpirun beside this Python or on PATH"
        hint = {"horovodrun": "hvdtrain horovod install", "mpirun": _GET_MPI}.get(name, "use another --launcher")
        raise HvdtrainError(f"{name} cannot be used: {why}", hint)
    return Choice(launcher, reason)


def _build(name: str, found: Found) -> Launcher | None:
    if name == "horovodrun":
        return Horovodrun(found.horovodrun, found.mpi, tuple(sorted(found.environ.items())), found.ssh)
    if name == "srun":
        return Srun(found.srun, found.pmi, found.overlap, found.srun_problem)
    if name == "jsrun":
        return Jsrun(found.jsrun, found.allocated)
    if name == "local":
        return Local(start_argv(found.python))
    if name == "mpirun":
        if found.mpi is None:
            return None
        if found.mpi.kind == "openmpi":
            return OpenMpi(found.mpi, found.root, found.home)
        return Hydra(found.mpi, "" if any(found.environ.get(name) for name in _AGENTS) else found.ssh)
    raise UsageError(f"unknown launcher '{name}'", f"use one of {', '.join(LAUNCHERS)}")
