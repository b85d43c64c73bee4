"""After a job failed: which rank failed first, where, and what the others said. Standard library only; used on every host."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Names the job to its ranks, which name it in their last words: files of another job in the same place are not taken for them.
JOB_VARIABLE = "HVDTRAIN_JOB"
_OTHERS_SHOWN = 16
#: What a rank says when another one has gone: Horovod, the Gloo below it, Open MPI, our own shared memory.
_CONSEQUENCE = re.compile(
    r"HorovodInternalError|Horovod (?:has been|was) shut down|gloo/transport/\S+\.cc|MPI_ERR_PROC_FAILED"
    r"|\(process \d+\) has ended, and this rank waits"
)
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Failure:
    """The last words of one rank."""

    rank: int
    time: float
    host: str = ""
    phase: str = ""
    error: str = ""
    hint: str = ""
    traceback: str = ""
    exit_code: int | None = None
    stalled: bool = False  # it ended because the job did not move
    stopped: bool = False  # it was asked to stop, and did so in order
    follows: bool = False  # it says itself that another rank is the cause, and speaks for it

    def with_code(self, code: int) -> Failure:
        """With the exit code that was seen from outside, unless the rank named its own."""
        return replace(self, exit_code=self.exit_code or code)

    def with_last_line(self, text: str) -> Failure:
        """A rank that was killed leaves no message; its last line of output says how far it came."""
        if not text or self.phase or not self.error.startswith("killed by signal"):
            return self
        return replace(self, error=f"{self.error}; the last line it wrote: {_one_line(text)}")

    @property
    def is_consequence(self) -> bool:
        """Whether it says no more than that another rank has gone or failed."""
        return self.follows or _CONSEQUENCE.search(self.error) is not None

    @property
    def where(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """From JSON; a field that is missing or of another type is left empty, since a dying rank may write anything."""
        code, rank, moment = record.get("exit_code"), record.get("rank"), record.get("time")
        return cls(
            rank=rank if isinstance(rank, int) else -1,
            time=float(moment) if isinstance(moment, int | float) else 0.0,
            **{name: str(record.get(name) or "") for name in ("host", "phase", "error", "hint", "traceback")},
            exit_code=code if isinstance(code, int) else None,
            stalled="stall" in record,
            stopped=record.get("stopped") is True,
            follows=record.get("follows") is True,
        )


def words_for(code: int, tail: Sequence[str], *, oom_kills: int | None = None) -> dict[str, str]:
    """What can be said about a rank that left no last words, from its exit code and the last lines of its stderr.

    ``oom_kills``: processes that the out-of-memory killer ended on its host while it ran, if that is known.
    """
    if code == 128 + signal.SIGKILL and oom_kills is not None:
        return _killed(oom_kills, tail)
    if signal_of(code):
        return {"error": describe_signal(code - 128), "traceback": "\n".join(tail)}
    last = exception_in(tail) or next((line.strip() for line in reversed(tail) if line.strip()), "")
    return {"error": f"exit code {code}" + (f": {last}" if last else ""), "traceback": "\n".join(tail) if len(tail) > 1 else ""}


def _killed(oom_kills: int, tail: Sequence[str]) -> dict[str, str]:
    """SIGKILL, by the out-of-memory killer or not."""
    words = {"error": "killed by signal 9 (SIGKILL)", "traceback": "\n".join(tail)}
    if not oom_kills:
        return words | {"error": f"{words['error']}: somebody's kill (the out-of-memory killer ended nothing on its host)"}
    return words | {
        "error": f"{words['error']}: out of memory (the kernel's out-of-memory killer ended a process on its host meanwhile)",
        "hint": "use a smaller batch, fewer ranks on this host, or a job with more memory; see dmesg there",
    }


def exception_in(lines: Sequence[str]) -> str:
    """The last line that names an exception, else empty."""
    return next((line.strip() for line in reversed(lines) if _EXCEPTION.match(line)), "")


def signal_of(code: int) -> str:
    """The name of the signal that an exit code of a shell's stands for; empty for a code that is none, as 255."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return ""


def describe_signal(number: int) -> str:
    """What a death by this signal usually means."""
    why: dict[int, str] = {
        signal.SIGKILL: ": the out-of-memory killer, or somebody's kill",
        signal.SIGSEGV: ": a crash in compiled code",
        signal.SIGBUS: ": a crash in compiled code, or /dev/shm is full",
        signal.SIGABRT: ": a library gave up, see its message above",
    }
    return f"killed by signal {number} ({signal_of(128 + number) or 'unknown'}){why.get(number, '')}"


def read(errors: Path, job: str) -> list[Failure]:
    """The failures that the ranks of ``job`` wrote to ``errors`` (rank-N.json), the earliest first.

    Records of other jobs are told by their name and not by their time: hosts' clocks differ.
    """
    failures = []
    for path in sorted(errors.glob("rank-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.get("job") == job:
                failures.append(Failure.from_record(record))
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # a half-written file says nothing, and must not hide the others
    return earliest_first(failures)


def earliest_first(failures: Sequence[Failure]) -> list[Failure]:
    """In the order of time, after those that have a reason of their own those that only tell that another rank has gone."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.time, failure.rank))


def report(failures: Sequence[Failure]) -> str:
    """The earliest failure in full, one line for each other that has a reason of its own."""
    first, *others = failures
    phase = f" in phase '{first.phase}'" if first.phase else ""
    lines = [f"{first.where} failed first{phase}: {first.error or 'no message'}"]
    if first.traceback:
        lines += ["", *(f"    {line}" for line in first.traceback.rstrip().splitlines()), ""]
    own = [other for other in others if not other.is_consequence]
    lines += [f"{other.where}: {_one_line(other.error)}" for other in own[:_OTHERS_SHOWN]]
    lines += [f"... and {len(own) - _OTHERS_SHOWN} more ranks"] if len(own) > _OTHERS_SHOWN else []
    lines += [bystanders(others)] if len(own) < len(others) else []
    return "\n".join(lines)


def bystanders(failures: Sequence[Failure]) -> str:
    """One sentence about those that only miss another rank."""
    ranks = [str(rank) for rank in sorted(failure.rank for failure in failures if failure.is_consequence)]
    more = f" and {len(ranks) - _OTHERS_SHOWN} more" if len(ranks) > _OTHERS_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_OTHERS_SHOWN])}{more} stopped because of that"


def exit_code(failures: Sequence[Failure], launcher_code: int) -> int:
    """The job's exit code: that of the rank that failed first where it is known, never 0 if anything failed."""
    known = [failure.exit_code for failure in failures if failure.exit_code]
    return known[0] if known else launcher_code or (1 if failures else 0)


def _one_line(text: str, limit: int = 160) -> str:
    line = text.strip().partition("\n")[0] or "no message"
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
