"""The command line of Hydra, the process manager of MPICH and of Intel MPI; its options differ between the two."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Host, Job, environment
from hvdtrain.launch.mpi import Mpi, joined_ssh_options, with_folder_first

#: From this many hosts on, MPICH gets them in a file; Intel MPI counts slots only in a file.
_FILE_FROM = 256


@dataclass(frozen=True)
class Hydra:
    """``mpirun`` of MPICH or Intel MPI."""

    mpi: Mpi
    name: str = "mpirun"

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        if job.elastic is not None:
            raise UsageError("mpirun cannot change the number of ranks of a running job", "use --launcher horovodrun")
        intel = self.mpi.kind == "intel"
        hosts, files = self._hosts(job, intel)
        argv = [self.mpi.mpirun, "-np", str(job.np), *hosts]
        env = dict(job.env)
        options = job.ssh.argv()
        if job.is_remote:
            argv += ["-launcher", "ssh"]
            if options:
                env["HYDRA_LAUNCHER_EXTRA_ARGS"] = joined_ssh_options(options)
        if job.nics:
            if len(job.nics) > 1 and not job.subnet:
                raise UsageError(f"{self.mpi} takes one network interface, got {', '.join(job.nics)}", "give --nic once")
            argv += ["-iface", job.nics[0]] if len(job.nics) == 1 else []
            env.setdefault("NCCL_SOCKET_IFNAME", ",".join(job.nics))
        if intel:
            # Our machinefile says how many ranks a host has, not the batch system; and the ranks' threads are counted by us.
            env.setdefault("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "off")
            env.setdefault("I_MPI_PIN", "off")
            # Its mpirun is a script that finds its other half on PATH only.
            env["PATH"] = with_folder_first(posixpath.dirname(self.mpi.mpirun), env.get("PATH", "/usr/bin:/bin"))
        odd = next((name for name in job.env if not environment.is_portable(name)), None)
        if odd is not None:
            raise UsageError(f"{self.mpi} cannot pass the variable '{odd}'", "leave it out")
        passed = sorted({*job.env} | ({"NCCL_SOCKET_IFNAME"} if job.nics else set()))
        argv += ["-genvlist", ",".join(passed)] if passed else ["-genvnone"]
        return Command((*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(job.env))

    def _hosts(self, job: Job, intel: bool) -> tuple[list[str], dict[str, str]]:
        odd = next((host for host in job.hosts if host.is_ipv6 or host.port is not None), None)
        if odd is not None:
            raise UsageError(
                f"{self.mpi} cannot take an IPv6 address or a port of a single host ({odd.address})",
                "give the host a name in ~/.ssh/config (HostName, Port) and use that name",
            )
        users = any(host.user for host in job.hosts)
        if users and intel:
            raise UsageError("Intel MPI takes no user in its list of hosts", "put User into ~/.ssh/config")
        if not intel and not users and len(job.hosts) < _FILE_FROM:
            return ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)], {}
        path = f"{job.launch_dir}/hosts"
        return ["-machinefile" if intel else "-f", path], {path: "".join(map(_line, job.hosts))}


def _line(host: Host) -> str:
    user = f" user={host.user}" if host.user else ""
    return f"{host.name}:{host.slots}{user}\n"
