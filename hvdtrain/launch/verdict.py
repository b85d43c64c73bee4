"""What is to be told about a job that has ended: the earliest failure; else why there is none to tell."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch import failures
from hvdtrain.launch.watch import Watch
from hvdtrain.stops import EXIT_STOPPED

_SEE_ABOVE = "see its message above"
_AGAIN = "give the same command again: nothing was lost"


@dataclass(frozen=True)
class Verdict:
    """A job's failure for people, and its exit code."""

    message: str
    hint: str
    exit_code: int
    #: whether starting the job again is of no use: somebody ended it, or it was asked for what cannot be
    is_final: bool = False
    #: whether it was asked to stop, and did so in order
    stopped: bool = False


def judge(code: int, watch: Watch, run_dir: Path | None = None) -> Verdict | None:
    """From the launcher's exit code and what was seen of the ranks; None for a job that ended well.

    An elastic job has ended well if its launcher says so, whichever of its ranks failed on the way.
    """
    found = watch.failures()
    if watch.is_done and (watch.was_signalled or watch.was_asked):  # which came when there was nothing left to end
        return None
    if not code and (watch.is_elastic or not found):
        return None
    if watch.was_asked_early:
        return Verdict("stopped before the ranks began", _AGAIN, EXIT_STOPPED, is_final=True, stopped=True)
    why, hint = _why_gone(watch)
    code = failures.exit_code(found, code) if found else code
    final = watch.was_signalled or watch.was_asked or code == UsageError.exit_code
    final |= bool(found) and found[0].phase == "launch"  # what cannot be started now will not be later
    if found:
        stopped = next((failure for failure in found if failure.stopped), None)
        if stopped is not None:  # all have agreed, or none goes on without it
            return Verdict(stopped.error, stopped.hint, EXIT_STOPPED, is_final=True, stopped=True)
        if found[0].stalled and watch.stall():
            return Verdict(watch.stall(), found[0].hint, code, final)
        if why and all(failure.is_consequence for failure in found):
            return Verdict(f"{why}\n{failures.bystanders(found)}", hint, code, final)
        message = failures.report(found)
        if watch.is_elastic:
            again = f"go on from the last checkpoint: the same command with --run-dir {run_dir}" if run_dir else ""
            message = f"{message}\nthe elastic job could not go on with the ranks that were left"
            return Verdict(message, found[0].hint or again, code, final)
        return Verdict(f"{message}\n{why}" if watch.silent_hosts() else message, found[0].hint, code, final)
    uncalled = watch.uncalled(code)
    if uncalled is not None and uncalled.exit_code == code and not watch.was_signalled:
        return Verdict(failures.report([uncalled]), "somebody's kill, or is its host going down?", code, final)
    if watch.was_signalled or code in (129, 130, 143):
        again = f"go on from the last checkpoint: the same command with --run-dir {run_dir}" if run_dir else ""
        return Verdict(f"the job was ended by a signal ({signal.Signals(code - 128).name})", again, code, is_final=True)
    ended = f"the launcher ended with exit code {code}"
    if watch.never_started():
        return Verdict(f"{ended}; never started: {_some(watch.never_started())}", _SEE_ABOVE, code, final)
    if why:
        return Verdict(f"{ended}; {why}", hint, code, final)
    if watch.silent():
        return Verdict(f"{ended}; no word from {_some(watch.silent())}", _SEE_ABOVE, code, final)
    return Verdict(f"{ended}, though no rank failed" if watch.hears_ranks else ended, _SEE_ABOVE, code, final)


def _why_gone(watch: Watch) -> tuple[str, str]:
    """Why ranks may be missing that did not fail (their host is silent, or they left before the others), and a hint; or empty."""
    lost, early = watch.silent_hosts(), watch.left_early()
    if lost:
        return f"no word from {_some(lost)}: is the host, or its network, down?", ""
    gone = f"{_some(early)} ended with exit code 0 while the others went on" if early else ""
    return gone, "look for os._exit, sys.exit or a return that not all ranks take" if early else ""


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
