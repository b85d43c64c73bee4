"""What we got from whoever started us, made fit for a command: standard streams and signals.

A stream may be closed, full, without a reader, set not to block, or of an encoding that lacks a character; SIGCHLD may be
ignored, and signals be blocked. None of that is a reason for a traceback, or for a wrong exit code.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: The name of the error handler that ``lenient`` is.
LENIENT = "hvdtrain"


class OutputError(OSError):
    """Standard output cannot be written to. It has no errno: Click takes each EPIPE for its own, and ends the process with 1."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or "it cannot be written to")
        #: whether its reader has gone, as in ``| head``
        self.is_unread = cause.errno == errno.EPIPE


def lenient(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes that came in as no text go out as they came; other characters that an encoding lacks as ``\\u2192``."""
    if isinstance(error, UnicodeEncodeError):
        first = error.object[error.start]
        if "\udc80" <= first <= "\udcff":
            return bytes([ord(first) - 0xDC00]), error.start + 1
        return first.encode("ascii", "backslashreplace"), error.start + 1
    return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(LENIENT, lenient)


class _Out(io.FileIO):
    """A standard stream whose first failure is told if it ``raises``, and which swallows what comes after it."""

    def __init__(self, fd: int, name: str, *, raises: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self.name = name
        self._raises, self._is_lost = raises, False

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest and not self._is_lost:
            try:
                written = cast("int | None", super().write(rest))
            except OSError as error:
                self._is_lost = True
                if self._raises:
                    raise OutputError(error) from None
                break
            if written is None:  # whoever shares it with us has set it not to block
                select.select([], [self], [])
            rest = rest[written or 0 :]
        return size


def prepare(*, is_rank: bool) -> None:
    """Mend what we inherited. A rank trains on, whether or not somebody reads what it says."""
    for fd in (0, 1, 2):  # a file that is opened later must not get the number of one that is closed
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(sys.stdout, 1, raises=not is_rank)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2, raises=False)
    with contextlib.suppress(ValueError):  # not in the main thread: then it is not ours to say
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # exit codes of children would be lost
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM}
    ours |= set() if is_rank else {signal.SIGUSR1}  # a rank takes it when it is ready
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)


def _stream(old: TextIO | None, fd: int, *, raises: bool) -> TextIO:
    """In place of ``sys.stdout`` or ``sys.stderr``, which is None where the descriptor was closed."""
    unbuffered = isinstance(old, io.TextIOWrapper) and old.write_through
    out = _Out(fd, "<stdout>" if fd == 1 else "<stderr>", raises=raises)
    return io.TextIOWrapper(
        cast("io.BufferedWriter", out) if unbuffered else io.BufferedWriter(out),
        encoding=(old.encoding if old is not None else None) or "utf-8",
        errors=LENIENT,
        line_buffering=old.line_buffering if isinstance(old, io.TextIOWrapper) else fd == 2,
        write_through=unbuffered,
    )


def takes_text(fd: int, within_s: float) -> bool:
    """Whether somebody reads what is written there, or will within this time."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(within_s * 1000))
