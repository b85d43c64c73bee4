"""No launcher at all: ranks as processes on this machine that find each other over Gloo.

``Local.command`` is the builder; ``main`` is what its command starts: a small process that serves Gloo's rendezvous, starts the
ranks, and ends all of them when one fails, when it is told to, or when whoever started it is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar

from hvdtrain.errors import UsageError
from hvdtrain.launch import GRACE_S, Command, Job, environment, is_this_machine
from hvdtrain.launch.limits import Limits

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Local:
    """``start`` is ``launch.start_argv``; ``here`` are names by which this machine is known."""

    start: tuple[str, ...]
    here: frozenset[str] = frozenset()
    name: str = "local"
    limits: ClassVar[Limits] = Limits(
        "the local launcher", ipv6=True, users=True, ports=True, odd_variables=True, arguments=False
    )

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        self.limits.check(job)
        away = next((host.name for host in job.hosts if not is_this_machine(host.name) and host.name not in self.here), None)
        if away is not None or len(job.hosts) > 1:
            names = ", ".join(host.name for host in job.hosts[:8])
            raise UsageError(
                f"the local launcher starts ranks on this machine only, got {names}", "use --launcher mpirun or horovodrun"
            )
        argv = (*self.start, "local", "--np", str(job.np), "--grace", str(job.grace_s + 1), "--", *job.argv)
        return Command(argv, job.env, secrets=environment.secrets(job.env))


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What Horovod's Gloo controller needs to know in each rank."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }


class _Ranks:
    """The running ranks."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = False

    def start(self, argv: Sequence[str], size: int, port: int) -> None:
        prepare = _dies_with_us()
        for rank in range(size):
            env = {**os.environ, **rank_environment(rank, size, port)}
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, preexec_fn=prepare)
            self._running[process.pid] = process

    def end(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Politely the first time, by force when time is up."""
        force = number == signal.SIGALRM
        for pid in self._running:  # not through Popen, which would reap a child that wait() is waiting for
            os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        if not self._ending:
            self._ending = True
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def wait(self) -> int:
        """Until all are gone; the exit code of the first that failed."""
        first = 0
        while self._running:
            pid, status = os.wait()
            process = self._running.pop(pid, None)
            if process is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if code and not first:
                first = 128 - code if code < 0 else code
                self.end()
        return first


def main(argv: Sequence[str]) -> int:
    """``start.py local --np N -- PROGRAM ARGS``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    at = list(argv).index("--")
    parser = argparse.ArgumentParser(prog="start.py local")
    parser.add_argument("--np", type=int, required=True)
    parser.add_argument("--grace", type=float, default=GRACE_S)
    args = parser.parse_args(argv[:at])
    from hvdtrain.launch.rendezvous import serve  # http.server takes 50 ms to import; the builder does not need it

    ranks = _Ranks(args.grace)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, ranks.end)
    with serve() as port:
        ranks.start(argv[at + 1 :], args.np, port)
        return ranks.wait()


def _dies_with_us() -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    return prepare
