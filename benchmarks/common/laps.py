"""What a rank notes of itself: when each step ended, and how much memory it took."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Laps:
    """The times of the steps' ends in seconds, for the parent to read in ``folder``."""

    folder: Path
    rank: int
    ends: list[float] = field(default_factory=list)

    def lap(self) -> None:
        self.ends.append(time.perf_counter())

    def write(self) -> None:
        """After the last step, while the other ranks and what was allocated are still there."""
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps({"ends": self.ends, "peak_mb": peak_mb()}))


def peak_mb() -> float:
    """The most memory that this process took, what it shares with its neighbours divided among them.

    The kernel notes a peak of all pages only (VmHWM). Of them it takes what is counted twice now: Rss - Pss, which changes
    little within a run.
    """
    status = _kilobytes("/proc/self/status")
    sizes = _kilobytes("/proc/self/smaps_rollup")
    return (status["VmHWM"] - (sizes["Rss"] - sizes["Pss"])) / 1024


def _kilobytes(path: str) -> dict[str, int]:
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}
