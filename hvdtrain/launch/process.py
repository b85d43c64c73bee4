"""Run a launcher's command and leave nothing behind: the one place on the launching side that starts processes."""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Command, frames, processes

#: How long a launcher has at least to end its ranks after a polite signal, before everything is killed.
PATIENCE_S = 8.0
#: What a launcher itself needs beyond the time that its ranks are given.
_LAUNCHERS_OWN_S = 3.0
#: How long output may still come after the launcher is gone.
_DRAIN_S = 1.0

#: Called with every event; the flag is True for the launcher's stderr. What it returns is a time in seconds after which the job
#: is to be ended if it has not ended by itself, or None. What it raises ends the job.
Observer = Callable[[frames.Event, bool], float | None]


def run(
    command: Command,
    base: Mapping[str, str],
    on_event: Observer,
    *,
    grace_s: float = 0.0,
    on_signal: Callable[[], None] = lambda: None,
) -> int:
    """Start the command, hand on its output and our signals, wait, and return an exit code as a shell counts it (128 + signal).

    SIGINT, SIGTERM and SIGHUP end the job politely, a second signal at once. After the polite end the launcher has
    ``PATIENCE_S``, or longer where its ranks have: ``grace_s``. Signals that were ignored when we
    started (``nohup``, or a script's ``&``) stay ignored. When this process is killed, the launcher gets SIGTERM by the kernel.
    ``on_signal`` is called at the first signal, before it is handed on: what is known then, the signal has not caused.
    """
    write_files(command.files)
    patience_s = max(PATIENCE_S, grace_s + _LAUNCHERS_OWN_S)
    with Forwarding(
        patience_s, on_signal
    ) as forwarding:  # before the start: a signal in between must not leave a launcher without us
        try:
            process = subprocess.Popen(
                command.argv,
                env=command.environment(base),
                stdin=subprocess.DEVNULL
                if os.isatty(0)
                else None,  # from another session it could not read the terminal anyway
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=processes.dies_with_us(),
            )
        except OSError as error:
            raise HvdtrainError(
                f"cannot start {command.argv[0]}: {error.strerror}", "is it installed? see: hvdtrain run --dry-run"
            ) from None
        try:
            forwarding.attach(process)
            with ending_after_us(process.pid, patience_s):
                _forward(process, on_event, patience_s)
        finally:
            end(process.pid, patience_s)
            forwarding.detach()  # once it is reaped, its number may be another's
            code = process.wait()
    if forwarding.received is not None:
        return 128 + forwarding.received
    return 128 - code if code < 0 else code


@contextmanager
def ending_after_us(group: int, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """While this is open: should this process die, even by SIGKILL, the process group is ended.

    The kernel's parent-death signal reaches the launcher's first process only, and horovodrun's is a shell that keeps it to
    itself. A forked child waits for the end of a pipe that only we hold open.
    """
    reads, writes = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        _watch(reads, group, patience_s)
    os.close(reads)
    try:
        yield
    finally:
        os.write(writes, b".")
        os.close(writes)
        os.waitpid(watcher, 0)


def _watch(reads: int, group: int, patience_s: float) -> NoReturn:
    """In the child: hold nothing open, hear no signal, and act when the pipe ends without a word."""
    os.setsid()
    for number in Forwarding.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, reads)
    os.closerange(reads + 1, 1 << 16)
    if os.read(reads, 1) == b"":
        end_at = time.monotonic() + patience_s
        processes.signal_group(group, signal.SIGTERM)
        while processes.signal_group(group, 0):
            if time.monotonic() > end_at:
                processes.signal_group(group, signal.SIGKILL)
                break
            time.sleep(0.05)
    os._exit(0)


def write_files(files: Mapping[str, str]) -> None:
    for path, text in files.items():
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                Path(path).chmod(0o755)
        except OSError as error:
            raise HvdtrainError(
                f"cannot write {path} for the launcher: {error.strerror}", "is there room, and permission?"
            ) from None


class Forwarding(AbstractContextManager["Forwarding"]):
    """While this is open, signals to us end the attached process, first politely, then by force. ``received`` is the first."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, patience_s: float = PATIENCE_S, on_signal: Callable[[], None] = lambda: None) -> None:
        self._patience_s, self._on_signal = patience_s, on_signal
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self.received: int | None = None

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.received is not None:
            self._end_politely(process)

    def detach(self) -> None:
        self._process = None

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
        again = self.received is not None
        if number != signal.SIGALRM and not again:
            self.received = number
            self._on_signal()
        if self._process is None:
            return
        if again or number == signal.SIGALRM:
            processes.signal_group(self._process.pid, signal.SIGKILL)
        else:
            self._end_politely(self._process)

    def _end_politely(self, process: subprocess.Popen[bytes]) -> None:
        os.kill(process.pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, self._patience_s)


def _forward(process: subprocess.Popen[bytes], on_event: Observer, patience_s: float) -> None:
    """Until the launcher is gone and both streams end; what it left behind may hold them open, so not long after it is gone."""
    assert process.stdout is not None
    assert process.stderr is not None
    gone_at, end_at = 0.0, math.inf
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr, ExitStack() as stack:
        exited = os.pidfd_open(process.pid)
        stack.callback(os.close, exited)
        selector.register(exited, selectors.EVENT_READ)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, (frames.Decoder(), is_error))
        while selector.get_map():
            for key, _ in selector.select(timeout=0.1):
                if key.fd == exited:
                    gone_at = time.monotonic()
                    selector.unregister(exited)
                    continue
                decoder, is_error = key.data
                data = os.read(key.fd, 65536)
                for event in decoder.feed(data) if data else decoder.close():
                    wait_s = on_event(event, is_error)
                    if wait_s is not None:
                        end_at = min(end_at, time.monotonic() + wait_s)
                if not data:
                    selector.unregister(key.fileobj)
            if time.monotonic() > end_at and not gone_at:
                end(process.pid, patience_s)
            if gone_at and time.monotonic() - gone_at > _DRAIN_S:
                break


def end(pid: int, patience_s: float = PATIENCE_S) -> None:
    """End what is left of a child of ours and its group: politely, so that it can end other hosts' ranks, then by force.

    It is not reaped here: until it is, its number is its own and its group's.
    """
    if not processes.has_ended(pid):
        os.kill(pid, signal.SIGTERM)
        end_at = time.monotonic() + patience_s
        while not processes.has_ended(pid) and time.monotonic() < end_at:
            time.sleep(0.02)
    processes.signal_group(pid, signal.SIGKILL)
