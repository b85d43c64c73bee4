"""Run a launcher's command and leave nothing behind: the one place on the launching side that starts processes."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum, auto
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Protocol

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.launch import START_FILE, Command, frames, linux

#: How long a launcher has at least to end its ranks after a polite signal, before everything is killed.
PATIENCE_S = 8.0
#: What a launcher itself needs beyond the time that its ranks are given.
_LAUNCHERS_OWN_S = 3.0
#: How long output may still come after the launcher is gone.
_DRAIN_S = 1.0

#: What the command line of a relay has in it.
RELAY = (START_FILE, "relay")

#: Called with every event; the flag is True for the launcher's stderr. What it returns is a time in seconds after which the job
#: is to be ended if it has not ended by itself, or None. What it raises ends the job.
Observer = Callable[[frames.Event, bool], float | None]


class Outlet(Protocol):
    """Where the observer writes: it keeps what its reader does not take yet. Nobody waits for a reader once the job is to end."""

    def waiting(self) -> Sequence[int]:
        """Descriptors that have something left to write."""

    def pump(self) -> None:
        """Write what can be written now. What this raises ends the job."""

    def is_full(self) -> bool:
        """Whether the launcher is to wait with its output."""

    def hurry(self) -> None:
        """A signal is to end the job: from now on no reader is waited for that takes nothing."""


def run(
    command: Command,
    base: Mapping[str, str],
    on_event: Observer,
    *,
    outlet: Outlet | None = None,
    grace_s: float = 0.0,
    stop_s: float = 0.0,
    on_signal: Callable[[], None] = lambda: None,
    on_asked: Callable[[], None] = lambda: None,
) -> int:
    """Start the command, hand on its output and our signals, wait, and return an exit code as a shell counts it (128 + signal).

    SIGINT, SIGTERM and SIGHUP end the job politely, a second signal at once. After the polite end the launcher has
    ``PATIENCE_S``, or longer where its ranks have: ``grace_s``. Signals that were ignored when we
    started (``nohup``, or a script's ``&``) stay ignored. When this process is killed, the launcher gets SIGTERM by the kernel.
    ``on_signal`` is called at the first signal, before it is handed on: what is known then, the signal has not caused.

    SIGUSR1 is handed on to the ranks. With ``stop_s`` they (in relays) know it as a request to stop in order: a first SIGTERM or
    SIGUSR1 hands that on to them, and ends the job as above if it has not ended ``stop_s`` later, or at once if no rank has begun.
    ``on_asked`` is called then.
    """
    write_files(command.files)
    patience_s = max(PATIENCE_S, grace_s + _LAUNCHERS_OWN_S)
    # Before the start: a signal in between must not leave a launcher without us.
    with Forwarding(patience_s, on_signal, stop_s, on_asked, passes_on=command.passes_on) as forwarding:
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
                preexec_fn=linux.dies_with_us(),
            )
        except OSError as error:
            raise HvdtrainError(
                f"cannot start {command.argv[0]}: {error.strerror}", "is it installed? see: hvdtrain run --dry-run"
            ) from None
        try:
            forwarding.attach(process.pid)
            with ending_after_us(process.pid, patience_s):
                _forward(process, on_event, forwarding, outlet)
        finally:
            linux.signal_group(process.pid, signal.SIGKILL)  # what it has left behind
            forwarding.detach()  # once it is reaped, its number may be another's
            code = process.wait()
    if forwarding.received is not None:
        return 128 + forwarding.received
    return 128 - code if code < 0 else code


def end_within(patience_s: float, tell: Callable[[int], object]) -> None:
    """SIGTERM now and SIGKILL when time is up, by the alarm clock: whoever reads what is said meanwhile can go on reading."""
    signal.signal(signal.SIGALRM, lambda number, frame: tell(signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, patience_s)
    tell(signal.SIGTERM)


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
    finally:  # not by a word: one that was killed or stopped does not hear it
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)
        os.close(writes)


def _watch(reads: int, group: int, patience_s: float) -> NoReturn:
    """In the child: hold nothing open, hear no signal, and act when the pipe ends."""
    os.setsid()
    for number in Forwarding.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, reads)
    os.closerange(reads + 1, 1 << 16)
    os.read(reads, 1)

    def tell(number: int) -> None:
        if not linux.signal_group(group, number) or number == signal.SIGKILL:
            os._exit(0)
        if number == signal.SIGTERM:
            linux.signal_group(group, signal.SIGCONT)

    end_within(patience_s, tell)
    while True:
        tell(0)
        time.sleep(0.05)


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def unwinding() -> Iterator[None]:
    """While this is open, a signal that is to end us closes everything that is open, so that nothing of ours stays.

    Where ``run`` is at work, they end its job instead. Those that were ignored when we started stay so.

    Raises:
        JobError: one came; with its exit code.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # another one must not tear the cleaning up
        raise _Signalled(number)

    before = {number: signal.getsignal(number) for number in {*Forwarding.SIGNALS, *Forwarding.ASKING}}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, unwind)
    try:
        yield
    except _Signalled as error:
        name = signal.Signals(error.number).name
        raise JobError(f"ended by a signal ({name})", exit_code=128 + error.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """While this is open, signals to us end the attached process, first politely, then by force. ``received`` is the first.

    The polite end is told to the process alone, so that it can end other hosts' ranks through what it has started.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    #: those that ask for a stop in order where the ranks know one
    ASKING = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        on_signal: Callable[[], None] = lambda: None,
        stop_s: float = 0.0,
        on_asked: Callable[[], None] = lambda: None,
        *,
        passes_on: bool = False,
    ) -> None:
        self._patience_s, self._on_signal = patience_s, on_signal
        self._stop_s, self._on_asked, self._passes_on = stop_s, on_asked, passes_on
        self._pid, self._has_ranks = 0, False
        self._state, self._asked = _State.RUNNING, 0
        self._stack = ExitStack()
        self.received: int | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the job is to end, in order or not."""
        return self._state is not _State.RUNNING

    @property
    def was_asked(self) -> bool:
        """Whether a signal to us is why."""
        return self._asked != 0 or self.received is not None

    def attach(self, pid: int) -> None:
        """``pid`` leads a group of its own, and is not reaped before ``detach``."""
        self._pid = pid
        if self.received is not None:
            self.end()

    def detach(self) -> None:
        self._pid = 0

    def started(self) -> None:
        """A rank has begun: from now on the launcher, or its relay, hands on what we ask for."""
        self._has_ranks = True

    def end(self) -> None:
        """Politely, by force when ``patience_s`` is over. Asked for again, the time is not longer."""
        if self._state is not _State.ENDING:
            self._state = _State.ENDING
            end_within(self._patience_s, self._tell)

    def _tell(self, number: int) -> None:
        if self._pid and number == signal.SIGKILL:
            linux.signal_group(self._pid, number)
        elif self._pid:
            os.kill(self._pid, number)
            os.kill(self._pid, signal.SIGCONT)  # a stopped process cannot end politely

    def __enter__(self) -> Forwarding:
        self._stack.callback(signal.signal, signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        self._stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        for number in {*self.SIGNALS, *self.ASKING}:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                self._stack.callback(signal.signal, number, before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stop_s and number in self.ASKING and self._state is _State.RUNNING:
            self._ask(number)
        elif number not in self.SIGNALS:
            if not self._stop_s and self._has_ranks:  # else it was asked for already
                self._pass_on(number)
        elif self.received is None:
            self._end_by(number)
        else:
            self._tell(signal.SIGKILL)

    def _end_by(self, number: int) -> None:
        self.received = number
        self._on_signal()
        if self._pid:
            self.end()

    def _ask(self, number: int) -> None:
        """Ask for a stop in order, and end the job if that comes to nothing."""
        self._state, self._asked = _State.ASKED, number
        self._on_asked()
        signal.signal(signal.SIGALRM, lambda *_: self._end_by(number) if self._state is _State.ASKED else None)
        signal.setitimer(signal.ITIMER_REAL, self._stop_s)
        if not (self._has_ranks and self._pass_on(signal.SIGUSR1)):  # nobody has begun, or can be asked
            self._end_by(number)

    def _pass_on(self, number: int) -> bool:
        """To the ranks; whether there is anybody who takes it. One that hears of a stop is enough: they agree."""
        heard = [self._pid] if self._passes_on else linux.below(self._pid, RELAY)
        for pid in heard:
            linux.signal_one(pid, number)
        return bool(heard)


class _State(Enum):
    RUNNING = auto()
    #: to stop in order
    ASKED = auto()
    ENDING = auto()


def _forward(process: subprocess.Popen[bytes], on_event: Observer, forwarding: Forwarding, outlet: Outlet | None) -> None:
    """Until the launcher is gone and both streams end; what it left behind may hold them open, so not long after it is gone.

    What the observer raises ends the launcher, and is raised when it is gone: nobody may stop reading before, for a launcher
    that cannot get rid of its last words does not end.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    gone_at, end_at = 0.0, math.inf
    raised: BaseException | None = None
    with process.stdout, process.stderr, ExitStack() as stack:
        exited = os.pidfd_open(process.pid)
        stack.callback(os.close, exited)
        streams: dict[int, tuple[frames.Decoder, bool]] = {}
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            os.set_blocking(stream.fileno(), False)
            streams[stream.fileno()] = frames.Decoder(), is_error
        while streams or not gone_at:
            if outlet is not None and forwarding.was_asked:
                outlet.hurry()
            waits = outlet is not None and outlet.is_full() and not forwarding.is_ending
            ready = _ready(
                [*(streams if not waits else ()), *([exited] if not gone_at else ())], outlet.waiting() if outlet else ()
            )
            if exited in ready or (gone_at and waits):
                gone_at = time.monotonic()
            for fd in ready & streams.keys():
                decoder, is_error = streams[fd]
                data = os.read(fd, 65536)
                for event in decoder.feed(data) if data else decoder.close():
                    if raised is not None:
                        break
                    if isinstance(event, frames.Started):
                        forwarding.started()
                    try:
                        wait_s = on_event(event, is_error)
                    except BaseException as error:
                        raised, wait_s = error, 0.0
                    if wait_s is not None:
                        end_at = min(end_at, time.monotonic() + wait_s)
                if not data:
                    del streams[fd]
            try:
                if outlet is not None:
                    outlet.pump()
            except OSError as error:
                raised, end_at = raised or error, 0.0
            if time.monotonic() > end_at and not gone_at:
                forwarding.end()
            if gone_at and time.monotonic() - gone_at > _DRAIN_S:
                break
    if raised is not None:
        raise raised


def _ready(readable: Iterable[int], writable: Iterable[int]) -> set[int]:
    """Those of these descriptors with which something can be done, within a moment."""
    poll = select.poll()
    for fd in readable:
        poll.register(fd, select.POLLIN)
    for fd in writable:
        poll.register(fd, select.POLLOUT)
    return {fd for fd, _ in poll.poll(100)}
