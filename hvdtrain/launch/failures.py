"""After a job failed: which rank failed first, where, and what the others said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_OTHERS_SHOWN = 16


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

    def with_code(self, code: int) -> Failure:
        """With the exit code that was seen from outside, unless the rank named its own."""
        return replace(self, exit_code=self.exit_code or code)

    def with_last_line(self, text: str) -> Failure:
        """A rank that was killed leaves no message; its last line of output says how far it came."""
        if not text or self.phase or not self.error.startswith("killed by signal"):
            return self
        return replace(self, error=f"{self.error}; the last line it wrote: {_one_line(text)}")

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
        )


def read(errors: Path) -> list[Failure]:
    """The failures that the ranks wrote to ``errors`` (rank-N.json), the earliest first."""
    failures = []
    for path in sorted(errors.glob("rank-*.json")):
        try:
            failures.append(Failure.from_record(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # a half-written file says nothing, and must not hide the others
    return earliest_first(failures)


def earliest_first(failures: Sequence[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda failure: (failure.time, failure.rank))


def report(failures: Sequence[Failure]) -> str:
    """The earliest failure in full, one line for each other."""
    first, *others = failures
    phase = f" in phase '{first.phase}'" if first.phase else ""
    lines = [f"{first.where} failed first{phase}: {first.error or 'no message'}"]
    if first.traceback:
        lines += ["", *(f"    {line}" for line in first.traceback.rstrip().splitlines()), ""]
    lines += [f"{other.where}: {_one_line(other.error)}" for other in others[:_OTHERS_SHOWN]]
    lines += [f"... and {len(others) - _OTHERS_SHOWN} more ranks"] if len(others) > _OTHERS_SHOWN else []
    return "\n".join(lines)


def exit_code(failures: Sequence[Failure], launcher_code: int) -> int:
    """The job's exit code: that of the rank that failed first where it is known, never 0 if anything failed."""
    known = [failure.exit_code for failure in failures if failure.exit_code]
    return known[0] if known else launcher_code or (1 if failures else 0)


def _one_line(text: str, limit: int = 160) -> str:
    line = text.strip().partition("\n")[0] or "no message"
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
