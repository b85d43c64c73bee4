"""Which MPI a ``mpirun`` belongs to; their options differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UsageError
from hvdtrain.launch import GRACE_S, Job, colon_list

Kind = Literal["openmpi", "mpich", "intel"]

_TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
_SYSTEM_PREFIXES = ("", "/", "/usr")
_PARAMETERS = ("mca", "gmca", "omca", "tune", "am", "amca")
_TAKEN_4 = frozenset({":", *(f"{dash}{name}" for dash in ("-", "--") for name in _PARAMETERS)})
_TAKEN: Mapping[Kind, frozenset[str]] = {
    "openmpi": _TAKEN_4
    | {f"--{name}" for name in ("prtemca", "pmixmca", "map-by", "bind-to", "rank-by", "runtime-options", "with-ft")},
    "mpich": frozenset({":"}),
    "intel": frozenset({":", "-configfile", "--configfile"}),
}
#: From this many hosts on, they go into a file: a single argument may not be longer than 128 KiB.
_FILE_FROM = 256


@dataclass(frozen=True)
class Mpi:
    """An MPI installation. ``prefix`` is the folder that holds its bin and lib; ``alone``: no batch system is to be asked."""

    kind: Kind
    version: tuple[int, ...]
    mpirun: str
    prefix: str = ""
    alone: bool = False

    @property
    def major(self) -> int:
        return self.version[0] if self.version else 0

    def __str__(self) -> str:
        return " ".join(filter(None, (_TITLES[self.kind], ".".join(map(str, self.version)))))

    @property
    def mca(self) -> str:
        """The option that sets a parameter of Open MPI's launching part, which is a project of its own since version 5."""
        return "-mca" if self.major < 5 else "--prtemca"

    @property
    def taken(self) -> frozenset[str]:
        """Words that its mpirun takes for its own, or rewrites, also where they stand behind the program's name."""
        return _TAKEN_4 if self.kind == "openmpi" and self.major < 5 else _TAKEN[self.kind]

    def daemon_args(self, job: Job) -> tuple[str, ...]:
        """Open MPI's options for its daemons: none here; where they are elsewhere, and how to notice that a host went silent."""
        if self.kind != "openmpi":
            return ()
        # mpirun waits this long between SIGTERM and SIGKILL, whether it has to or not.
        patience = (self.mca, "odls_base_sigkill_timeout", str(math.ceil(job.grace_s) + 1)) if job.grace_s > GRACE_S else ()
        if not job.is_remote:
            return (*patience, *(self._no_batch(job) if len(job.hosts) == 1 else ()))
        args = [] if self.prefix in _SYSTEM_PREFIXES else ["--prefix", self.prefix]
        # Without these mpirun waits 8 minutes for a host that lost power or its cable; with them, 10 seconds.
        keepalive = {"time": "5", "intvl": "2", "probes": "3"}
        for name, value in keepalive.items():
            args += [self.mca, f"oob_tcp_keepalive_{name}", value]
        if any("." in host.name and not _is_ipv4(host.name) for host in job.hosts):
            args += [self.mca, "orte_keep_fqdn_hostnames" if self.major < 5 else "prte_keep_fqdn_hostnames", "1"]
        return (*args, *(self._no_batch(job) if self.alone else ()), *patience)

    def _no_batch(self, job: Job) -> Iterator[str]:
        """For hosts of no batch job, whatever variables say. On this machine alone there need be no ssh either."""
        plm = "ssh" if self.major >= 5 else "rsh" if job.is_remote else "isolated"
        parts = {"plm": plm, "ras": "^slurm,tm,pbs,lsf,gridengine,alps"}
        for part, value in parts.items():
            if part not in job.launcher_args:
                yield from (self.mca, part, value)

    def ssh_args(self, job: Job) -> tuple[str, ...]:
        """Open MPI's options for its ssh."""
        if self.kind != "openmpi" or not job.is_remote:
            return ()
        name = "plm_rsh" if self.major < 5 else "plm_ssh"
        options = job.ssh.argv()
        args = [self.mca, f"{name}_args", joined_ssh_options(options)] if options else []
        if len(job.hosts) >= 64:
            args += [self.mca, f"{name}_num_concurrent", str(len(job.hosts))]
        return tuple(args)


def parse_version(text: str, mpirun: str, prefix: str = "") -> Mpi:
    """What ``mpirun --version`` printed -> the MPI. UsageError if it is none that we know."""
    for pattern, kind in _VERSIONS:
        match = re.search(pattern, text)
        if match:
            return Mpi(kind, tuple(int(part) for part in re.findall(r"\d+", match[1] or "")[:3]), mpirun, prefix)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    raise UsageError(
        f"{mpirun} belongs to no MPI that is known here; 'mpirun --version' says: {first[:100]}",
        "put Open MPI, MPICH or Intel MPI first on PATH, or use --launcher srun or --launcher local",
    )


_VERSIONS: Sequence[tuple[str, Kind]] = (
    (r"\((?:Open MPI|OpenRTE|PRRTE)\)\s*([\d.]*)", "openmpi"),
    (r"Intel\(R\) MPI Library[^\d]*Version\s*([\d.]*)", "intel"),
    (r"HYDRA build details:\s*(?:Version:\s*([\d.]+))?", "mpich"),
    (r"MPICH[^\d]*([\d.]*)", "mpich"),
)


def host_args(job: Job, file_option: str, text: str, option: str = "") -> tuple[list[str], dict[str, str]]:
    """An mpirun's arguments for the hosts, and the files that they name.

    Args:
        text: what the file holds.
        option: takes the hosts as ``a:2,b:1`` where there are few; empty if it cannot say all that there is to say.
    """
    if option and len(job.hosts) < _FILE_FROM:
        return [option, colon_list(job.hosts)], {}
    path = job.file("hosts")
    return [file_option, path], {path: text}


def joined_ssh_options(options: Sequence[str]) -> str:
    """ssh options as the one value that Open MPI splits at blanks."""
    odd = next((option for option in options if re.search(r"[\s'\"]", option)), None)
    if odd is not None:
        raise UsageError(f"this MPI splits ssh options at blanks, so it cannot pass {odd!r}", "put it into ~/.ssh/config")
    return " ".join(options)


def _is_ipv4(name: str) -> bool:
    return re.fullmatch(r"[0-9.]+", name) is not None


def with_folder_first(folder: str, path: str) -> str:
    """A PATH on which ``folder`` comes before all others."""
    return path if path.split(":")[0] == folder or not folder else ":".join(filter(None, (folder, path)))
