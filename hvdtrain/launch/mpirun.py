"""The command line of Open MPI's ``mpirun``, versions 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Host, Job, dialects, environment
from hvdtrain.launch.mpi import Mpi

#: From this many hosts on, they go into a file: a single argument may not be longer than 128 KiB.
_FILE_FROM = 256


@dataclass(frozen=True)
class OpenMpi:
    """``root``: mpirun refuses to run as root unless it is told that this is meant."""

    mpi: Mpi
    root: bool = False
    name: str = "mpirun"

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        if job.elastic is not None:
            raise UsageError("mpirun cannot change the number of ranks of a running job", "use --launcher horovodrun")
        five = self.mpi.major >= 5
        mca = "--mca" if five else "-mca"
        argv = [self.mpi.mpirun, *(["--allow-run-as-root"] if self.root else []), "-np", str(job.np)]
        hosts, files = self._hosts(job)
        argv += hosts
        argv += ["--bind-to", "none", "--map-by", "slot"]
        if not five and "btl" not in job.launcher_args:
            argv += [mca, "btl", "^openib"]  # gone in 5; in 4 it warns on every InfiniBand host, which UCX serves
        if job.tagged:
            argv += ["--output", "tag"] if five else ["--tag-output"]
        argv += [*self.mpi.daemon_args(job), *self.mpi.ssh_args(job)]
        if job.nics:
            argv += [mca, "btl_tcp_if_include", job.subnet if len(job.nics) > 1 and job.subnet else ",".join(job.nics)]
        for name in sorted(job.env):
            argv += ["-x", name]
        argv += [*job.launcher_args, *job.argv]
        env = {**({"NCCL_SOCKET_IFNAME": ",".join(job.nics)} if job.nics else {}), **job.env}
        return Command(tuple(argv), env, files=files, secrets=environment.secrets(job.env))

    def _hosts(self, job: Job) -> tuple[list[str], dict[str, str]]:
        if any(host.is_ipv6 or host.port is not None for host in job.hosts):
            odd = next(host for host in job.hosts if host.is_ipv6 or host.port is not None)
            raise UsageError(
                f"Open MPI's mpirun cannot take an IPv6 address or a port of a single host ({odd.address})",
                "give the host a name in ~/.ssh/config (HostName, Port) and use that name",
            )
        if len(job.hosts) < _FILE_FROM and not any(host.user for host in job.hosts):
            return ["-H", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)], {}
        path = f"{job.launch_dir}/hosts"
        plain = [Host(host.name, host.slots, host.user) for host in job.hosts]
        return ["--hostfile", path], {path: dialects.render(plain, "openmpi")}
