"""A file that the user names, read once and whole: a regular file, a pipe (``<(command)``), a terminal or a device.

It never waits without end and never fills the memory: a pipe through which nothing comes, and a device that never ends, are errors.
"""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

MAX_BYTES = 16 * 2**20

#: How long nothing may come through a pipe. Somebody at a terminal may think as long as they like.
IDLE_S = 30.0


def read(path: str | Path, *, idle_s: float = IDLE_S) -> bytes:
    """All that is in the file; ``-`` is standard input.

    Raises:
        OSError: it cannot be read; ``strerror`` says why, also where it is too large or silent.
    """
    if str(path) == "-":
        return _all(0, idle_s)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return _all(descriptor, idle_s)
    finally:
        os.close(descriptor)


def _all(descriptor: int, idle_s: float) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    wait_ms = None if os.isatty(descriptor) else idle_s * 1000
    data = bytearray()
    while len(data) <= MAX_BYTES:
        # A pipe that nobody has opened for writing yet looks like one that has ended, except to poll.
        if not poll.poll(wait_ms):
            raise OSError(errno.ETIMEDOUT, f"nothing came through it for {idle_s:g} s, and it did not end")
        try:
            chunk = os.read(descriptor, 2**20)
        except BlockingIOError:
            continue
        if not chunk:
            return bytes(data)
        data += chunk
    raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES // 2**20} MiB")
