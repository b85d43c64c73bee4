"""One rank of a job: what is known of it so far, and its last words before the job is ended."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.failures import JOB_VARIABLE
from hvdtrain.launch.frames import RUNNING, WORDS_WANTED, words_line
from hvdtrain.launch.stall import Stall
from hvdtrain.progress import HERE
from hvdtrain.rundir import RunDir, write_json
from hvdtrain.stops import EXIT_STOPPED, StopNow, StoppedError
from hvdtrain.watchdog import Watchdog
from hvdtrain.world import World

#: The exit code of a rank that did not get on, as that of timeout(1).
EXIT_STALLED = 124
#: How long such a rank lives on, for the launcher to hear of the others.
_OTHERS_S = 3.0


@dataclass
class Rank:
    """What is known of this rank so far: what its last words are made of."""

    world: World = field(default_factory=World)
    comm: Communicator | None = None
    #: where the job's files are to go; they are this job's once the primary holds it
    run_dir: RunDir | None = None
    is_claimed: bool = False
    #: holds the run directory
    lock: IO[str] | None = None
    #: seconds of each phase from the command to the end of the first step; empty before that, and on other ranks than the primary
    startup: Mapping[str, float] = field(default_factory=dict)
    #: the watchdog has said why, and is about to end the process
    is_ending: bool = False


def guard(body: Callable[[Rank], None]) -> int:
    """Run a rank's ``body``; if it fails, write its last words and end every rank of the job. The exit code."""
    rank = Rank()
    HERE.begin()
    try:
        body(rank)
    except BaseException as error:
        return fail(rank, error)
    if rank.comm is not None:
        rank.comm.close()
    return 0


def fail(rank: Rank, error: BaseException) -> int:
    """Say why this rank ends, and end the ranks that do not know of it; the exit code."""
    if rank.is_ending:  # what is raised now follows from that
        time.sleep(2 * _OTHERS_S)
    if isinstance(error, HvdtrainError) and error.on_all_ranks and not rank.world.is_primary:
        words = _words(rank, error.message, error.hint, "", error.exit_code)
        _tell_relay({**words, "follows": True, "stopped": isinstance(error, StoppedError)})
        return error.exit_code  # the primary speaks for all
    code = 1
    try:
        code = _last_words(rank, error)
    finally:  # even if nobody can be told: the others wait for this rank
        if not getattr(error, "on_all_ranks", False):
            if rank.comm is not None:
                rank.comm.abort(code)
            elif rank.world.size > 1:  # it may have met the others already: an exit in order would wait for them
                os._exit(code)
    return code


@contextlib.contextmanager
def watched(rank: Rank, limit_s: float, *, ends: bool) -> Iterator[None]:
    """While this is open, a rank that does not get on for ``limit_s`` explains itself, and ends the job if it ``ends``.

    In an elastic job it ends itself alone: one that waits for others goes on without them when they are gone.
    """

    def stalled(stall: Stall, final: bool) -> None:
        fatal = final and ends and not (rank.world.elastic and stall.waits)
        text = f"no progress for {stall.seconds:.0f} s (--stall-timeout): {stall.text}"
        hint = "if this may take so long, raise --stall-timeout"
        words = _words(rank, text, hint, stall.stacks, EXIT_STALLED) | {"stall": stall.to_record()}
        if not fatal:
            _tell_relay({**words, RUNNING: True})
        if final and not fatal:
            _print(rank, "Warning", text, hint, "" if stall.waits else stall.stacks)
        elif fatal:
            rank.is_ending = True
            _tell_relay(words)
            _write_down(rank, words)
            _print(rank, "Error", text, hint, "" if os.environ.get(WORDS_WANTED) else stall.stacks)
            time.sleep(_OTHERS_S)
            os._exit(EXIT_STALLED)

    if not limit_s:
        yield
        return
    watchdog = Watchdog(HERE, limit_s, stalled)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.close()


def _last_words(rank: Rank, error: BaseException) -> int:
    """Say and write down why this rank ends; the exit code."""
    text, hint, code = _reason(rank, error)
    trace = "" if isinstance(error, HvdtrainError | KeyboardInterrupt) else "".join(traceback.format_exception(error))
    words = _words(rank, text, hint, trace, code) | {"stopped": isinstance(error, StoppedError | StopNow)}
    _tell_relay(words)
    _write_down(rank, words)
    if not (words["stopped"] and os.environ.get(WORDS_WANTED)):  # the launcher says it
        _print(rank, "Note" if words["stopped"] else "Error", text, hint, trace)
    return code


def _words(rank: Rank, error: str, hint: str, trace: str, code: int) -> dict[str, Any]:
    return {
        "time": time.time(),
        "job": os.environ.get(JOB_VARIABLE, ""),
        "rank": rank.world.rank,
        "host": socket.gethostname(),
        "phase": HERE.where,
        "error": error,
        "hint": hint,
        "traceback": trace,
        "exit_code": code,
    }


def _print(rank: Rank, level: str, text: str, hint: str, trace: str) -> None:
    where = f"rank {rank.world.rank} on {socket.gethostname()}, {HERE.where}: "
    who = where if rank.world.size > 1 else ""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens
        sys.stdout.flush()  # what the recipe printed: an abort runs no exit handler
        sys.stderr.write(f"{trace}{level}: {who}{text}\n" + (f"Hint: {hint}\n" if hint and rank.world.is_primary else ""))
        sys.stderr.flush()


def _tell_relay(words: Mapping[str, Any]) -> None:
    """For the launcher; where there is no relay, it reads the files that ``_write_down`` writes."""
    if os.environ.get(WORDS_WANTED):
        with contextlib.suppress(OSError, ValueError), open(2, "wb", closefd=False) as stderr:
            stderr.write(words_line(words).encode())


def _write_down(rank: Rank, words: Mapping[str, Any]) -> None:
    """In the run directory, unless another job holds it."""
    if rank.run_dir is not None:
        with contextlib.suppress(OSError, HvdtrainError):
            if not rank.is_claimed:  # no rank of this job holds it yet
                rank.run_dir.check_free()
            write_json(rank.run_dir.error_json(rank.world.rank), words)


def _reason(rank: Rank, error: BaseException) -> tuple[str, str, int]:
    """What happened, what to type, and the exit code."""
    if isinstance(error, HvdtrainError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, StopNow):
        return str(error), "the same command goes on from the last checkpoint, if there is one", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        again = f"go on from the last checkpoint with --run-dir {rank.run_dir.path}" if rank.run_dir else ""
        return f"interrupted: {HERE.where}", again, 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) and error.code not in (0, EXIT_STOPPED) else 1
        return f"sys.exit({error.code!r}) was called before the end of the training", "", code
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if out_of_memory(error):
        first = next(iter(_text(error).splitlines()), "") or type(error).__name__
        return f"out of memory{notes}: {first[:200]}", _LESS_MEMORY, 1
    return f"{type(error).__name__}: {_text(error)}{notes}", "", 1


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as odd:
        return f"(its text cannot be told: {type(odd).__name__})"


_LESS_MEMORY = (
    "use a smaller --batch-size, more ranks, or Update(micro_batch_size=...), which gives the same gradient in parts; "
    "--resume auto goes on from the last checkpoint"
)


def out_of_memory(error: BaseException) -> bool:
    """Whether the host's or a device's memory was too small, by what Python, NumPy, PyTorch and TensorFlow raise then."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or names & {"OutOfMemoryError", "ResourceExhaustedError"}:
        return True
    return (
        isinstance(error, RuntimeError)
        and re.search(r"DefaultCPUAllocator|[Cc]annot allocate memory|out of memory", _text(error)) is not None
    )
