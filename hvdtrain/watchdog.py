"""Notices that a rank does not get on, and says what it is at: the phase, the collective, the stacks of all threads.

It looks from a thread, and communicates with nobody: where ranks wait for each other, no collective can tell why. Each rank
speaks for itself, and the launcher puts together who waits for whom (``launch.stall``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.launch.stall import Stall
from hvdtrain.progress import Progress

#: Before training begins, data are prepared, models built and compiled: everything may take this much longer.
SETUP_FACTOR = 10
#: From this part of the limit on, a rank says where it stands, so that the launcher knows of all when the first reaches the limit.
EARLY = 0.5
#: Time that Python may be held up by native code beyond the limit, before the C library's own thread tells the stacks.
_NATIVE_S = 1.5
_TICK_S = 0.5

#: Whose data loading it is that a step waits for.
LOADER_THREAD = "hvdtrain-loader"


class Watchdog:
    """Looks twice a second whether ``progress`` has changed.

    Args:
        limit_s: time without a change after which ``stalled`` is called with ``final=True``; earlier once with False.
        stalled: is called in the watchdog's thread.
    """

    def __init__(self, progress: Progress, limit_s: float, stalled: Callable[[Stall, bool], None]) -> None:
        self._progress, self._limit_s, self._stalled = progress, limit_s, stalled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TICK_S)
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        seen, still_s, told, patience = self._progress.moved_at, 0.0, False, 1
        tick_s = min(_TICK_S, self._limit_s / 8)
        while not self._closed.wait(tick_s):
            limit_s = self._limit_s * patience * (SETUP_FACTOR if self._progress.step is None else 1)
            self._arm(limit_s)
            if self._progress.moved_at != seen:
                seen, still_s, told, patience = self._progress.moved_at, 0.0, False, 1
                continue
            still_s += tick_s  # not by the clock: a process that was stopped, or a machine that slept, did not stall
            if still_s >= limit_s * EARLY and not told:
                told = True
                self._tell(still_s, final=False)
            if still_s >= limit_s:
                self._tell(still_s, final=True)
                still_s, told, patience = 0.0, False, 2 * patience  # where it is not ended by that, not to be told all the time

    def _tell(self, still_s: float, *, final: bool) -> None:
        try:
            stall = self.look(still_s)
        except Exception as error:  # whatever is odd about this process, it stands still
            progress = self._progress
            stall = Stall(progress.phase, progress.step, still_s, "", True, f"{type(error).__name__}: {error}", "")
        self._stalled(stall, final)

    def _arm(self, limit_s: float) -> None:
        """If this thread, too, is held up (native code that keeps Python's lock), the stacks come from outside of Python."""
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # no stderr
            faulthandler.dump_traceback_later(limit_s + _NATIVE_S, file=2)

    def look(self, seconds: float = 0.0) -> Stall:
        """Where the rank stands now."""
        progress, wait = self._progress, self._progress.wait
        stacks = thread_stacks()
        loads = progress.phase == "data loading" and not wait and LOADER_THREAD in stacks
        name = LOADER_THREAD if loads else "MainThread"
        order = sorted(stacks, key=lambda thread: (thread != name, thread != "MainThread", thread))
        text = "\n".join(f"{thread}:\n{''.join(traceback.format_list(stacks[thread]))}" for thread in order)
        what, certain = (str(wait), wait.certain) if wait else ("", True)
        return Stall(progress.phase, progress.step, round(seconds, 1), what, certain, place(stacks.get(name, [])), text)


def thread_stacks() -> dict[str, list[traceback.FrameSummary]]:
    """The stack of each thread but our own, by the thread's name; the innermost frame last. Frames that only start it are left out."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[str, list[traceback.FrameSummary]] = {}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            name = threads.get(ident, "a thread")
            found[name if name not in found else f"{name} {ident}"] = _without_start(traceback.extract_stack(frame))
    return found


def _without_start(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    starts = [number for number, frame in enumerate(stack) if (frame.filename, frame.name) in _STARTS]
    return list(stack[starts[-1] + 1 if starts else 0 :] or stack[-1:])


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """``train.py:88 in take``: the innermost line of the user's own code, where there is any."""
    own = [frame for frame in stack if is_users(frame.filename)]
    if not stack:
        return "no Python code"
    frame = (own or stack)[-1]
    return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"


def is_users(filename: str) -> bool:
    """Whether the file is neither Python's, nor an installed package's, nor ours."""
    return not filename.startswith("<") and not any(filename.startswith(folder) for folder in _FOREIGN)


#: the functions that start a thread, and a rank
_STARTS = {
    *((threading.__file__, name) for name in ("_bootstrap", "_bootstrap_inner", "run")),
    (str(Path(__file__).resolve().with_name("worker.py")), "_run"),
}

_FOREIGN = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {f"{Path(__file__).resolve().parent}/"}
)


def _short(filename: str) -> str:
    """Relative to where the rank was started, if it lies there."""
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
