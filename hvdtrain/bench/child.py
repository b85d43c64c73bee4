"""A job that this process starts and reads."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvdtrain.launch import linux


@contextmanager
def started(argv: Sequence[str], *, apart: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The job, which ends with us: in order if it can. Its stdout is a pipe of text.

    Args:
        apart: in a session of its own, so that Ctrl-C is for us alone; with nothing to read, and its stderr among its stdout.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if apart else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if apart else None,
        text=True,
        errors="replace",
        start_new_session=apart,
        preexec_fn=linux.dies_with_us(signal.SIGTERM),
    )
    try:
        yield child
    except BaseException:
        child.terminate()
        raise
    finally:
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
