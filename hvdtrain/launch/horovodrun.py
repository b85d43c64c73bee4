"""The command line of Horovod's own launcher, for Horovod 0.28.

It puts its arguments and its folder into a string for ``/bin/sh -c`` (only the ranks' command is quoted there), exports every
variable that it finds in its environment, and with Gloo writes their values on the ssh command line. Hence the checks below, and
hence it gets an environment that holds nothing but what the ranks are to have, and a program of ours named ssh.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.errors import UsageError
from hvdtrain.launch import MAX_ARGUMENT, Command, Job, colon_list, environment, size_of, ssh
from hvdtrain.launch.limits import Limits
from hvdtrain.launch.mpi import Mpi, with_folder_first
from hvdtrain.world import is_identity

#: Bytes of the words and variables that horovodrun adds to a command of its own.
_ITS_OWN = 2048

#: A host on which a rank failed is not used for twice to three times the first number of seconds, then for twice as long each
#: time, up to the second number. Without it, never again. The user's own comes later on the command line, and counts.
_COOL_DOWN = ("--blacklist-cooldown-range", "30", "1800")

#: What horovodrun itself and the ssh or mpirun below it need, beside the ranks' variables.
_NEEDS = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TERM", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "KRB5CCNAME", "XDG_RUNTIME_DIR"),
    *("OMPI_*", "OPAL_*", "PMIX_*", "PRTE_*", "I_MPI_*", "HYDRA_*", "MPICH_*", "SLURM_*", "LSB_*", "LSF_*", "PBS_*"),
)


@dataclass(frozen=True)
class Horovodrun:
    """``path`` is the program, empty if it is not there. ``environ`` is the environment it may take from, ``ssh`` the real ssh."""

    path: str
    mpi: Mpi | None
    environ: tuple[tuple[str, str], ...] = ()
    ssh: str = ""
    name: str = "horovodrun"
    limits: ClassVar[Limits] = Limits(
        "horovodrun", elastic=True, instead="put User and Port into ~/.ssh/config, or use --launcher mpirun and a host name"
    )

    def unavailable_reason(self) -> str:
        if not self.path:
            return "Horovod is not installed here (no horovodrun beside this Python or on PATH)"
        return ""

    def command(self, job: Job) -> Command:
        gloo = job.controller == "gloo" or job.elastic is not None
        self.limits.check(job, frozenset() if gloo or self.mpi is None else self.mpi.taken)
        mpi = None if gloo else self._mpi_for(job)
        argv = [*_elsewhere(job), self.path, *self._hosts(job), "--gloo" if gloo else "--mpi", "--disable-cache"]
        if job.nics:
            odd = next((nic for nic in job.nics if shlex.quote(nic) != nic), None)
            if odd is not None:
                raise UsageError(f"{odd!r} is no name of a network interface that a shell can be given", "see: ip -br address")
            argv += ["--network-interfaces", ",".join(job.nics)]
        argv += job.launcher_args if mpi is None else _mpi_args(mpi, job)
        argv += [f"--start-timeout={start_timeout_s(len(job.hosts))}", *job.argv]
        env, files = self._environment(job, mpi), {}
        size = _longest_argument(job, argv, env, gloo=gloo)
        if size > MAX_ARGUMENT:
            names = f" with {len(job.hosts)} hosts" if len(job.hosts) > 1 and not gloo else ""
            what = f"horovodrun puts the command{names}{' and all variables' if gloo else ''} into one argument"
            raise UsageError(
                f"{what}: {size:,} bytes, and Linux takes {MAX_ARGUMENT:,}",
                "use --launcher mpirun or srun" if not gloo else "use fewer or shorter arguments and variables",
            )
        if self.ssh and job.is_remote:
            path, text = ssh.for_horovodrun(job, self.ssh)
            files[path] = text
            env["PATH"] = with_folder_first(posixpath.dirname(path), env.get("PATH", "/usr/bin:/bin"))
        return Command(tuple(argv), env, inherit=False, files=files, secrets=environment.secrets(job.env))

    def _mpi_for(self, job: Job) -> Mpi:
        if self.mpi is None:
            raise UsageError(
                "horovodrun --mpi needs mpirun, and there is none here", "hvdtrain horovod install brings one; or use --gloo"
            )
        if self.mpi.kind == "mpich":
            raise UsageError(
                f"horovodrun does not recognise {self.mpi}",
                "use --launcher mpirun, which starts the ranks with it directly, or --gloo",
            )
        if self.mpi.kind == "intel" and len({host.slots for host in job.hosts}) > 1:
            raise UsageError(
                f"horovodrun takes no unequal slots with Intel MPI ({colon_list(job.hosts[:8])})", "use --launcher mpirun"
            )
        return self.mpi

    def _hosts(self, job: Job) -> list[str]:
        np = ["-np", str(job.np)]
        if job.elastic is None:
            # Not --hostfile: its parser dies on blank lines and comments. It starts a rank for every slot it is told of.
            return [*np, "-H", colon_list(job.hosts)]
        maximum = ["--max-np", str(job.elastic.max_np)] if job.elastic.max_np is not None else []
        script = shlex.quote(job.elastic.discovery_script)  # Horovod gives it to a shell
        if _elsewhere(job):
            script = f"cd {shlex.quote(job.cwd)} && exec {script}"
        return [*np, "--min-np", str(job.elastic.min_np), *maximum, "--host-discovery-script", script, *_COOL_DOWN]

    def _environment(self, job: Job, mpi: Mpi | None) -> dict[str, str]:
        # Local ranks keep the GPUs that this shell was given; other hosts have their own.
        patterns = _NEEDS if job.is_remote else (*_NEEDS, "*CUDA_VISIBLE_DEVICES")
        needed = {
            name: value
            for name, value in self.environ
            if environment.matches(name, patterns)
            and environment.is_portable(name)
            and not environment.is_secret(name)
            and not is_identity(name)
        }
        values = {**needed, **job.env}
        if mpi is not None:  # it runs the mpirun that is first on PATH, and the ranks must load the same MPI
            values["PATH"] = with_folder_first(posixpath.dirname(mpi.mpirun), values.get("PATH", ""))
        secret = next(iter(sorted(environment.secrets(values))), "")
        if mpi is None and secret:
            raise UsageError(
                f"horovodrun --gloo would show the secret {secret} on command lines",
                "use --launcher mpirun, or let the job read a file",
            )
        return values


def _longest_argument(job: Job, argv: list[str], env: Mapping[str, str], *, gloo: bool) -> int:
    """About how long the argument will be that it makes for a shell."""
    if not gloo:
        return len(shlex.join(argv).encode(errors="surrogateescape")) + sum(len(name) + 4 for name in env) + _ITS_OWN
    words = [*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(job.argv)]
    line = " ".join(words)
    return size_of(shlex.quote(line) if job.is_remote else line) + _ITS_OWN


def _elsewhere(job: Job) -> tuple[str, ...]:
    """What starts horovodrun in a folder whose name means nothing to a shell, where the job's folder has one that does.

    With Gloo it writes the name of its folder unquoted into the command of each remote shell. Our relays go to the job's.
    """
    if job.controller != "gloo" or not job.is_remote or shlex.quote(job.cwd) in (job.cwd, "''"):
        return ()
    if not job.tagged:
        raise UsageError(
            f"horovodrun --gloo gives the name of this folder to a shell on each host as it is: {job.cwd!r}",
            "leave --no-relay out, or go to a folder whose name has only letters, digits and . _ - /",
        )
    return ("/bin/sh", "-c", 'cd / && exec "$0" "$@"')


def _mpi_args(mpi: Mpi, job: Job) -> list[str]:
    """For the mpirun below it."""
    args = [*mpi.daemon_args(job), *job.launcher_args]
    argv = []
    if mpi.kind == "openmpi" and mpi.major >= 5:
        argv += ["--binding-args=--bind-to none --map-by slot"]  # its own '-bind-to none' is refused: "Executable: none"
    return [*argv, f"--mpi-args={shlex.join(args)}"] if args else argv


def start_timeout_s(hosts: int) -> int:
    """Horovod's 30 s is too short for many or busy hosts: half a second more for each."""
    return 60 + hosts // 2
