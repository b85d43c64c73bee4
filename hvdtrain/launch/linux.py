"""Processes as Linux sees them: groups, descendants, who dies with whom. Standard library only; used on every host."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: how often what is left is killed: a process that forks while it is looked for is found the next time
_ROUNDS = 50

_prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(number: int) -> None:
    """The kernel sends us this signal when the thread that started us is gone, even by SIGKILL."""
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def dies_with_us(number: int = signal.SIGTERM, *more: Callable[[], object]) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets this signal when we are gone, and does what else is to be done before it starts."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(number)
        if os.getppid() != parent:
            os._exit(128 + number)
        for do in more:
            do()

    return prepare


def holds(number: int) -> Callable[[], object]:
    """For ``dies_with_us``: the signal waits until the child, or what it becomes, lets it through."""
    return lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def signals_wait(numbers: Set[int]) -> Iterator[Callable[[], None]]:
    """While this is open, these signals wait for ``sigwait``: a loop that takes them one by one has no handler to race with.

    Yields what lets a child have them again (for ``preexec_fn``, or after a fork).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield let_through
    finally:
        let_through()


def has_ended(pid: int) -> bool:
    """Whether a child of ours is gone. It is not reaped, so its number is not given to another process yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def signal_group(group: int, number: int) -> bool:
    """Whether there was anybody to hear it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_descendants(keep: int = 0) -> None:
    """End what is left below us; for one that adopts orphans, also what left its session. Our children are waited for.

    ``keep`` is a child that is waited for elsewhere, where its exit code is wanted; it is killed with the others.
    """
    for _ in range(_ROUNDS):
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not (below if keep else _has_children()):
            return
        time.sleep(0.01)


def _has_children() -> bool:
    """Whether any is left, once those that have ended are reaped. Lists in /proc may leave out one that comes or goes."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def descendants(pid: int) -> list[int]:
    """Live ones; a child that has ended and is still to be waited for does not count."""
    found: list[int] = []
    queue = [pid]
    while queue:
        children = _children(queue.pop())
        found += [child for child in children if is_alive(child)]
        queue += children
    return found


def unread(fd: int) -> int:
    """Bytes that were written to a pipe and not read yet; 0 for what is no pipe."""
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def oom_kills() -> int | None:
    """How many processes the kernel's out-of-memory killer has ended on this host; None where the kernel does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)


def _children(pid: int) -> list[int]:
    """Of all its threads: each has those that it has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def below(pid: int, words: Sequence[str]) -> list[int]:
    """The descendants of a process that have these words in this order, one after the other, in their command line."""
    wanted = b"\0".join(os.fsencode(word) for word in words) + b"\0"
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found


def signal_one(pid: int, number: int) -> None:
    """To a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether a process with this number runs; one that only waits to be reaped does not."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped it (SIGSTOP, a debugger)."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    """The letter of ps; X for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"
