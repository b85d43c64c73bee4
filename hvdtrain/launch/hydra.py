"""The command line of Hydra, the process manager of MPICH and of Intel MPI; its options differ between the two."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Host, Job, environment, ssh
from hvdtrain.launch.limits import Limits
from hvdtrain.launch.mpi import Mpi, host_args, with_folder_first

#: How many hosts Intel's mpirun reaches by itself; these reach the others.
_BRANCHES = 16


@dataclass(frozen=True)
class Hydra:
    """``mpirun`` of MPICH or Intel MPI. ``ssh`` is the program that reaches other hosts, empty where that is the user's own."""

    mpi: Mpi
    ssh: str = ""
    name: str = "mpirun"

    @property
    def limits(self) -> Limits:
        return Limits(f"mpirun of {self.mpi}", users=self.mpi.kind == "mpich")

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        self.limits.check(job, self.mpi.taken)
        intel = self.mpi.kind == "intel"
        listed = "".join(map(_line, job.hosts))
        if intel:  # it counts slots only in a file
            hosts, files = host_args(job, "-machinefile", listed)
        else:
            hosts, files = host_args(job, "-f", listed, "" if any(host.user for host in job.hosts) else "-hosts")
        argv = [self.mpi.mpirun, "-np", str(job.np), *hosts]
        passed = environment.of_ranks(job)
        env = dict(passed)
        if not job.is_remote and not {"-launcher", "-bootstrap"} & set(job.launcher_args):
            argv += ["-launcher", "fork"]  # else variables of a batch system make it use srun and its like
        if job.is_remote and self.ssh:
            path, text = ssh.for_hydra(job, self.ssh)
            files = {**files, path: text}
            argv += ["-launcher", "ssh", "-launcher-exec", path]
            if intel and len(job.hosts) > _BRANCHES:  # else it starts from host to host, where our program is not
                env.setdefault("I_MPI_HYDRA_BRANCH_COUNT", str(len(job.hosts)))
        if len(job.nics) > 1 and not job.subnet:
            raise UsageError(f"{self.mpi} takes one network interface, got {', '.join(job.nics)}", "give --nic once")
        argv += ["-iface", job.nics[0]] if len(job.nics) == 1 else []
        if intel:
            # Our machinefile says how many ranks a host has, not the batch system; and the ranks' threads are counted by us.
            env.setdefault("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "off")
            env.setdefault("I_MPI_PIN", "off")
            # Its mpirun is a script that finds its other half on PATH only.
            env["PATH"] = with_folder_first(posixpath.dirname(self.mpi.mpirun), env.get("PATH", "/usr/bin:/bin"))
        argv += ["-genvlist", ",".join(sorted(passed))] if passed else ["-genvnone"]
        return Command(
            (*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(env), passes_on=True
        )


def _line(host: Host) -> str:
    user = f" user={host.user}" if host.user else ""
    return f"{host.name}:{host.slots}{user}\n"
