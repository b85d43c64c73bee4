"""No launcher at all: ranks as processes on this machine that find each other over Gloo.

``Local.command`` is the builder; ``main`` is what its command starts: a small process that serves Gloo's rendezvous, starts the
ranks, and ends all of them when one fails, when it is told to, or when whoever started it is gone.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.errors import UsageError
from hvdtrain.launch import GRACE_S, Command, Job, environment, linux
from hvdtrain.launch.limits import Limits


@dataclass(frozen=True)
class Local:
    """``start`` is ``launch.start_argv``."""

    start: tuple[str, ...]
    name: str = "local"
    limits: ClassVar[Limits] = Limits(
        "the local launcher", ipv6=True, users=True, ports=True, odd_variables=True, arguments=False
    )

    def unavailable_reason(self) -> str:
        return ""

    def command(self, job: Job) -> Command:
        self.limits.check(job)
        if job.is_remote or len(job.hosts) > 1:
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
    """The running ranks. Signals wait until ``wait`` takes them: there is no handler that could miss a rank, or hit another process."""

    SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._kill_at = math.inf

    def start(self, argv: Sequence[str], size: int, port: int, let_through: Callable[[], None]) -> None:
        prepare = linux.dies_with_us(signal.SIGTERM, let_through)
        for rank in range(size):
            env = {**os.environ, **rank_environment(rank, size, port)}
            stdin = None if rank == 0 else subprocess.DEVNULL  # as every launcher does
            process = subprocess.Popen(argv, env=env, stdin=stdin, preexec_fn=prepare)
            self._running[process.pid] = process

    def wait(self) -> int:
        """Until all are gone; the exit code of the first that failed. A signal, or a rank that fails, ends the others."""
        first = 0
        while True:
            for code in self._reap():
                if code and not first:
                    first = 128 - code if code < 0 else code
                    self._end()
            if not self._running:
                return first
            taken = signal.sigtimedwait(self.SIGNALS, max(0.0, min(self._kill_at - time.monotonic(), 3600.0)))
            if taken is not None and taken.si_signo != signal.SIGCHLD:
                self._end()
            elif time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
                self._kill_at = math.inf

    def _reap(self) -> Iterator[int]:
        """The exit codes of those that are gone."""
        for pid in [pid for pid in self._running if linux.has_ended(pid)]:
            yield self._running.pop(pid).wait()

    def _end(self) -> None:
        """Politely; by force when time is up."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process cannot end politely
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)

    def _signal(self, number: int) -> None:
        for pid in self._running:  # none of them is reaped, so each number is still its own
            os.kill(pid, number)


def main(argv: Sequence[str]) -> int:
    """``start.py local --np N -- PROGRAM ARGS``."""
    linux.die_with_parent(signal.SIGTERM)
    at = list(argv).index("--")
    parser = argparse.ArgumentParser(prog="start.py local")
    parser.add_argument("--np", type=int, required=True)
    parser.add_argument("--grace", type=float, default=GRACE_S)
    args = parser.parse_args(argv[:at])
    from hvdtrain.launch.rendezvous import serve  # http.server takes 50 ms to import; the builder does not need it

    ranks = _Ranks(args.grace)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with linux.signals_wait(ranks.SIGNALS) as let_through, serve() as port:
        try:
            ranks.start(argv[at + 1 :], args.np, port, let_through)
        except OSError as error:  # what is wrong with the program is so with the first rank
            print(f"cannot start {argv[at + 1]}: {error.strerror}", file=sys.stderr)
            return 126 if isinstance(error, PermissionError) else 127
        return ranks.wait()
