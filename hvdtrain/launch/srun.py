"""The command line of Slurm's ``srun``: ranks as tasks of a job step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Job, environment, nodelist


@dataclass(frozen=True)
class Srun:
    """``pmi`` is the plugin that our MPI talks to (of ``srun --mpi=list``), empty for Slurm's default."""

    path: str
    pmi: str = ""
    name: str = "srun"

    def unavailable_reason(self) -> str:
        return "" if self.path else "srun is not on PATH"

    def command(self, job: Job) -> Command:
        if job.elastic is not None:
            raise UsageError("srun cannot change the number of ranks of a running job", "use --launcher horovodrun")
        odd = next((host for host in job.hosts if host.user or host.port is not None or host.is_ipv6), None)
        if odd is not None:
            raise UsageError(
                f"srun knows its nodes by name; it takes no user, port or address ({odd.login})", "use the node's name"
            )
        names = [host.name for host in job.hosts]
        argv = [self.path, f"--ntasks={job.np}", f"--nodes={len(names)}"]
        env = dict(job.env)
        files: dict[str, str] = {}
        if len({host.slots for host in job.hosts}) == 1 and names == sorted(names, key=_slurms_order):
            argv += [
                f"--ntasks-per-node={job.hosts[0].slots}",
                f"--nodelist={nodelist.compress(names)}",
                "--distribution=block",
            ]
        else:
            # The only way to give nodes unequal numbers of tasks, or another order than Slurm's: a file with a line for each task.
            path = f"{job.launch_dir}/hosts"
            files[path] = "".join(f"{host.name}\n" * host.slots for host in job.hosts)
            env["SLURM_HOSTFILE"] = path
            argv += ["--distribution=arbitrary"]
        argv += [f"--mpi={self.pmi}"] if self.pmi else []
        # A rank that fails ends the step; the relay counts threads by itself, so tasks are not bound to single CPUs.
        argv += ["--kill-on-bad-exit=1", "--cpu-bind=none"]
        if job.nics:
            env.setdefault("NCCL_SOCKET_IFNAME", ",".join(job.nics))
            env.setdefault("OMPI_MCA_btl_tcp_if_include", ",".join(job.nics))
        passed = sorted({*job.env} | {name for name in ("NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include") if name in env})
        odd_name = next((name for name in passed if not environment.is_portable(name)), None)
        if odd_name is not None:
            raise UsageError(f"srun cannot pass the variable '{odd_name}'", "leave it out")
        argv += [f"--export={','.join(passed) or 'NONE'}"]
        return Command((*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(job.env))


def _slurms_order(name: str) -> list[tuple[int, str]]:
    """Slurm keeps its nodes in the order of their numbers, whatever the order in a node list."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def parse_pmi_list(text: str, mpi_kind: str) -> str:
    """The plugin to use, from what ``srun --mpi=list`` printed: PMIx for Open MPI, PMI-2 for the others where it is there."""
    known = set(text.replace(",", " ").split())
    wanted = ("pmix", "pmix_v5", "pmix_v4", "pmix_v3") if mpi_kind == "openmpi" else ("pmi2", "pmix")
    return next((plugin for plugin in wanted if plugin in known), "")
