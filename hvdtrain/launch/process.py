"""Run a launcher's command and leave nothing behind: the one place here that starts processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType, TracebackType

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Command

#: How long a launcher has to end its ranks after a polite signal, before everything is killed.
GRACE_S = 8.0

_PR_SET_PDEATHSIG = 1


def run(command: Command, base: Mapping[str, str]) -> int:
    """Start the command, pass signals on, wait, and return an exit code as a shell counts it (128 + n for signal n).

    SIGINT, SIGTERM and SIGHUP end the job politely, a second signal or ``GRACE_S`` at once. Signals that were ignored when we
    started (``nohup``, or a script's ``&``) stay ignored. When this process is killed, the launcher gets SIGTERM by the kernel.
    """
    for path, text in command.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    try:
        process = subprocess.Popen(
            command.argv, env=command.environment(base), start_new_session=True, preexec_fn=_die_with_parent()
        )
    except OSError as error:
        raise HvdtrainError(
            f"cannot start {command.argv[0]}: {error.strerror}", "is it installed? see: hvdtrain run --dry-run"
        ) from None
    with Forwarding(process) as forwarding:
        code = process.wait()
    kill_group(process.pid)
    if forwarding.received is not None:
        return 128 + forwarding.received
    return 128 - code if code < 0 else code


class Forwarding(AbstractContextManager["Forwarding"]):
    """While this is open, signals to us become signals to the process group of ``process``. ``received`` is the first one."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stack = ExitStack()
        self.received: int | None = None

    def __enter__(self) -> Forwarding:
        for number in (*self.SIGNALS, signal.SIGALRM):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN or number == signal.SIGALRM:
                signal.signal(number, self._handle)
                self._stack.callback(signal.signal, number, before)
        self._stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM or self.received is not None:
            kill_group(self._process.pid)
            return
        self.received = number
        _signal(self._process.pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def kill_group(group: int, wait_s: float = 0.0) -> None:
    """Kill what is left of a process group."""
    _signal_group(group, signal.SIGKILL)
    end = time.monotonic() + wait_s
    while time.monotonic() < end and _signal_group(group, 0):
        time.sleep(0.02)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends ``number`` to the child when this thread's process is gone, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + number)

    return prepare
