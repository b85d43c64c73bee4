"""Our stdout and stderr while a job runs: a reader that stalls must not keep us from ending the job."""

from __future__ import annotations

import os
import select
import stat
import sys

from hvdtrain.cli.inherited import LENIENT, OutputError

#: From this on the job is to wait for the reader.
_FULL_BYTES = 1 << 20
#: From this on text is dropped: nobody has waited.
_MOST_BYTES = 8 << 20
#: How long a reader that takes nothing is waited for once a signal is to end the job.
_PATIENCE_S = 1.0
#: What a pipe that takes something takes without blocking.
_PIECE_BYTES = select.PIPE_BUF


class Terminal:
    """Text waits here until it can be written: nothing of this blocks but ``finish``.

    A reader that has gone raises OutputError, once. Other failures of stdout (a full disk) are told on stderr, and the job goes
    on; what stderr cannot take is dropped.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._patience_s: float | None = None
        self._out = _Queue(out, sys.stdout.encoding)
        self._err = self._out if _are_one(out, err) else _Queue(err, sys.stderr.encoding)

    def write(self, line: str, *, is_error: bool = False) -> None:
        """A line. It is dropped where the reader has stalled and nobody waited for ``is_full`` to change."""
        (self._err if is_error else self._out).put(line)
        self.pump()

    def pump(self) -> None:
        """Write what can be written now."""
        if self._err is not self._out:
            try:
                self._err.pump()
            except OSError:
                self._err.give_up()
        try:
            self._out.pump()
        except OSError as error:
            self._out.give_up()
            lost = OutputError(error)
            if lost.is_unread:
                raise lost from None
            self._err.put(f"Warning: standard output cannot be written to any more ({lost}); the job goes on")

    def waiting(self) -> list[int]:
        """Descriptors that have something left to write."""
        return [queue.fd for queue in {id(queue): queue for queue in (self._out, self._err)}.values() if queue.data]

    def is_full(self) -> bool:
        return self._out.is_full or self._err.is_full

    def hurry(self) -> None:
        self._patience_s = _PATIENCE_S

    def finish(self) -> None:
        """Write all. A reader that takes nothing is waited for, but not for long after ``hurry``; then the rest is dropped."""
        while waiting := self.waiting():
            before = len(self._out.data), len(self._err.data)
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLOUT)
            poll.poll(None if self._patience_s is None else self._patience_s * 1000)
            self.pump()
            if self._patience_s is not None and (len(self._out.data), len(self._err.data)) == before:
                return


class _Queue:
    """What waits for one descriptor."""

    def __init__(self, fd: int, encoding: str | None) -> None:
        self.fd, self._encoding = fd, encoding or "utf-8"
        self.data = bytearray()
        self._is_lost = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def is_full(self) -> bool:
        return len(self.data) >= _FULL_BYTES

    def put(self, line: str) -> None:
        if not self._is_lost and len(self.data) < _MOST_BYTES:
            self.data += f"{line}\n".encode(self._encoding, LENIENT)

    def pump(self) -> None:
        while self.data and self._poll.poll(0):
            try:
                written = os.write(self.fd, self.data[:_PIECE_BYTES])
            except BlockingIOError:
                return
            del self.data[:written]

    def give_up(self) -> None:
        self._is_lost = True
        self.data.clear()


def _are_one(out: int, err: int) -> bool:
    """Whether both are one pipe or terminal: then what is written to them keeps its order."""
    try:
        first, second = os.fstat(out), os.fstat(err)
    except OSError:
        return False
    return os.path.samestat(first, second) and not stat.S_ISREG(first.st_mode)
