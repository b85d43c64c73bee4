"""Child processes of an installation: none of them outlives it, and none asks a question."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: How long a child may take to end after SIGTERM before it is killed.
GRACE_S = 5.0


@dataclass(frozen=True)
class Result:
    """How a command ended. ``output`` is standard output and error together, unless they were asked for apart."""

    code: int
    output: str
    errors: str = ""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0


def scripts_folder() -> str:
    """Where this environment keeps its programs, also when it is not activated."""
    return sysconfig.get_path("scripts")


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """PATH with this environment's programs first, as if it were activated."""
    return os.pathsep.join([scripts_folder(), *environ.get("PATH", os.defpath).split(os.pathsep)])


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    apart: bool = False,
    shielded: bool = False,
) -> Result:
    """Run to the end and return what was printed. An interrupt ends the whole process group before it is passed on.

    ``shielded`` lets the command finish first instead: for steps that must not stop half-way.
    """
    errors = subprocess.PIPE if apart else subprocess.STDOUT
    with _interrupts_wait() if shielded else contextlib.nullcontext():
        process = _start(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=errors)
        try:
            output, error_output = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            output, error_output = process.communicate()
            return Result(process.returncode, output, error_output or "", timed_out=True)
        except KeyboardInterrupt:
            end_group(process)
            raise
        return Result(process.returncode, output, error_output or "")


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold an interrupt back until the end of the block. Only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def stream(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: IO[str], on_line: Callable[[str], None]) -> int:
    """Run a long command, copy its output to ``log`` and show each line to ``on_line``; returns the exit code."""
    process = _start(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            for line in lines:
                log.write(line)
                log.flush()
                on_line(line.rstrip("\n"))
        return process.wait()
    except BaseException:
        end_group(process)
        raise


def end_group(process: subprocess.Popen[str]) -> None:
    """End a child and everything it started: politely, then for certain."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def _start(
    command: Sequence[str], *, env: Mapping[str, str] | None, cwd: Path | None, stdout: int, stderr: int
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
