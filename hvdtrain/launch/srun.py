"""The command line of Slurm's ``srun``: ranks as tasks of a job step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.launch import Command, Job, environment, nodelist
from hvdtrain.launch.limits import Limits


@dataclass(frozen=True)
class Srun:
    """``pmi`` is the plugin that our MPI talks to (of ``srun --mpi=list``), empty for Slurm's default.

    ``overlap``: we run in a step ourselves (``srun --pty``), and the new step would wait for the end of this one.
    ``problem`` says why an srun that is there cannot be used.
    """

    path: str
    pmi: str = ""
    overlap: bool = False
    problem: str = ""
    name: str = "srun"
    limits: ClassVar[Limits] = Limits("srun", instead="Slurm knows its nodes by name: use the node's name")

    def unavailable_reason(self) -> str:
        return self.problem if self.path else "srun is not on PATH"

    def command(self, job: Job) -> Command:
        self.limits.check(job)
        names = [host.name for host in job.hosts]
        argv = [self.path, f"--ntasks={job.np}", f"--nodes={len(names)}"]
        env = environment.of_ranks(job)
        if job.nics:
            env.setdefault("OMPI_MCA_btl_tcp_if_include", ",".join(job.nics))
        passed = sorted(env)
        files: dict[str, str] = {}
        if len({host.slots for host in job.hosts}) == 1 and names == sorted(names, key=_slurms_order):
            argv += [
                f"--ntasks-per-node={job.hosts[0].slots}",
                f"--nodelist={nodelist.compress(names)}",
                "--distribution=block",
            ]
        else:
            # The only way to give nodes unequal numbers of tasks, or another order than Slurm's: a file with a line for each task.
            path = job.file("hosts")
            files[path] = "".join(f"{host.name}\n" * host.slots for host in job.hosts)
            env["SLURM_HOSTFILE"] = path
            argv += ["--distribution=arbitrary"]
        argv += [f"--mpi={self.pmi}"] if self.pmi else []
        argv += ["--overlap"] if self.overlap else []
        # A rank that fails ends the step; the relay counts threads by itself, so tasks are not bound to single CPUs.
        argv += ["--kill-on-bad-exit=1", "--cpu-bind=none"]
        argv += [f"--export={','.join(passed) or 'NONE'}"]
        return Command(
            (*argv, *job.launcher_args, *job.argv), env, files=files, secrets=environment.secrets(env), passes_on=True
        )


def _slurms_order(name: str) -> list[tuple[int, str]]:
    """Slurm keeps its nodes in the order of their numbers, whatever the order in a node list."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def knows_overlap(text: str) -> bool:
    """Whether the Slurm of which this is ``srun --version`` has ``--overlap``: from 20.11 on, before which steps shared CPUs."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return match is not None and (int(match[1]), int(match[2])) >= (20, 11)


def parse_pmi_list(text: str, mpi_kind: str) -> str:
    """The plugin to use, from what ``srun --mpi=list`` printed: PMIx for Open MPI, PMI-2 for the others where it is there."""
    known = set(text.replace(",", " ").split())
    wanted = ("pmix", "pmix_v5", "pmix_v4", "pmix_v3") if mpi_kind == "openmpi" else ("pmi2", "pmix")
    return next((plugin for plugin in wanted if plugin in known), "")
