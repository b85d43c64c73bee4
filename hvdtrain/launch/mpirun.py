"""The command line of Open MPI's ``mpirun``, versions 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.errors import UsageError
from hvdtrain.launch import MAX_ARGUMENT, Command, Host, Job, dialects, environment, size_of
from hvdtrain.launch.limits import Limits
from hvdtrain.launch.mpi import Mpi, host_args


@dataclass(frozen=True)
class OpenMpi:
    """``root``: mpirun refuses to run as root unless it is told that this is meant. ``home`` is for a shell that names none."""

    mpi: Mpi
    root: bool = False
    home: str = ""
    name: str = "mpirun"
    limits: ClassVar[Limits] = Limits("Open MPI's mpirun", users=True, odd_variables=True)

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        self.limits.check(job, self.mpi.taken)
        five = self.mpi.major >= 5
        mca = "--mca" if five else "-mca"
        argv = [self.mpi.mpirun, *(["--allow-run-as-root"] if self.root else []), "-np", str(job.np)]
        hosts, files = host_args(job, "--hostfile", _hostfile(job), "" if any(host.user for host in job.hosts) else "-H")
        argv += hosts
        argv += ["--bind-to", "none", "--map-by", "slot"]
        if not five and "btl" not in job.launcher_args:
            argv += [mca, "btl", "^openib"]  # gone in 5; in 4 it warns on every InfiniBand host, which UCX serves
        if job.tagged:
            argv += ["--output", "tag"] if five else ["--tag-output"]
        argv += [*self.mpi.daemon_args(job), *self.mpi.ssh_args(job)]
        if job.nics:
            argv += [mca, "btl_tcp_if_include", job.subnet if len(job.nics) > 1 and job.subnet else ",".join(job.nics)]
        env = environment.of_ranks(job)
        for name in sorted(env):
            argv += ["-x", name]
        if self.home:
            env["HOME"] = self.home
        command = Command(
            (*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(env), passes_on=True
        )
        _check_arguments(job)
        return command


def _check_arguments(job: Job) -> None:
    """It gives each rank all arguments once more, in one variable."""
    size = size_of(f"OMPI_ARGV={' '.join(job.argv[1:])}")
    if size > MAX_ARGUMENT:
        raise UsageError(
            f"the arguments would be {size:,} bytes long in all, and Open MPI takes {MAX_ARGUMENT:,}",
            "write them to a file that the program reads",
        )


def _hostfile(job: Job) -> str:
    return dialects.render([Host(host.name, host.slots, host.user) for host in job.hosts], "openmpi")
