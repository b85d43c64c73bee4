"""The command line of LSF's ``jsrun``: one resource set with all CPUs and GPUs for each host, the ranks inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Job, environment
from hvdtrain.launch.limits import Limits


@dataclass(frozen=True)
class Jsrun:
    path: str
    name: str = "jsrun"
    limits: ClassVar[Limits] = Limits("jsrun", instead="LSF knows its hosts by name: use the host's name")

    def unavailable_reason(self) -> str:
        return "" if self.path else "jsrun is not on PATH"

    def command(self, job: Job) -> Command:
        self.limits.check(job)
        if len({host.slots for host in job.hosts}) != 1:
            slots = ", ".join(f"{host.name}: {host.slots}" for host in job.hosts[:8])
            raise UsageError(
                f"jsrun places the same number of ranks on each host ({slots})", "use --launcher mpirun, or a multiple"
            )
        per_host = job.hosts[0].slots
        argv = [self.path, "--nrs", str(len(job.hosts)), "--rs_per_host", "1", "--tasks_per_rs", str(per_host)]
        argv += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none", "--launch_distribution", "packed"]
        argv += ["--exit_on_error", "1"]
        env = environment.of_ranks(job)
        for name in sorted(env):
            argv += ["--env", name]
        return Command((*argv, *job.launcher_args, *job.argv), env, secrets=environment.secrets(env))
