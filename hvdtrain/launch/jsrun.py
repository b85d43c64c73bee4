"""The command line of LSF's ``jsrun``: ranks in resource sets that hold all CPUs and GPUs of their host.

Sets of one size on every host of the allocation are options. Anything else is an explicit resource file
(https://www.ibm.com/docs/en/SSWRJV_10.1.0/jsm/erf_format.html), which names the host of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.launch import Command, Job, environment, place
from hvdtrain.launch.limits import Limits

#: Ranks share what their host has, and more CPUs are named than any host has: how many there are is not known here.
_PREAMBLE = """\
cpu_index_using: logical
overlapping_rs: allow
skip_missing_cpu: allow
skip_missing_gpu: allow
skip_missing_mem: allow
oversubscribe_cpu: allow
oversubscribe_gpu: allow
oversubscribe_mem: allow
"""
_ALL_CPUS = "{0-1023}"


@dataclass(frozen=True)
class Jsrun:
    """``allocated`` are the names of the allocation's hosts, in its order; empty if they are not known."""

    path: str
    allocated: tuple[str, ...] = ()
    name: str = "jsrun"
    limits: ClassVar[Limits] = Limits("jsrun", instead="LSF knows its hosts by name: use the host's name")

    def unavailable_reason(self) -> str:
        return "" if self.path else "jsrun is not on PATH"

    def command(self, job: Job) -> Command:
        self.limits.check(job)
        argv, files = [self.path], {}
        if len({host.slots for host in job.hosts}) == 1 and tuple(host.name for host in job.hosts) == self.allocated:
            per_host = job.hosts[0].slots
            argv += ["--nrs", str(len(job.hosts)), "--rs_per_host", "1", "--tasks_per_rs", str(per_host)]
            argv += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none"]
            argv += ["--launch_distribution", "packed"]
        else:
            path = job.file("ranks.erf")
            files[path] = resource_file(job)
            argv += ["--erf_input", path]
        argv += ["--exit_on_error", "1"]
        env = environment.of_ranks(job)
        for name in sorted(env):
            argv += ["--env", name]
        return Command((*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(env))


def resource_file(job: Job) -> str:
    """The explicit resource file: a line for each rank. jsrun needs the newline at the end."""
    lines = [
        f"rank: {slot.rank}: {{ hostname: {slot.host.name}; cpu: {_ALL_CPUS} ; gpu: * ; mem: * }}\n"
        for slot in place(job.hosts)
    ]
    return _PREAMBLE + "".join(lines)
