"""Where the time from the command to the end of the first step went, phase by phase. The primary's; the others wait for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

#: The variable in which ``hvdtrain run`` says when it began with this start of the job, and when it started the launcher:
#: two numbers, as ``time.time()`` counts.
LAUNCH = "HVDTRAIN_LAUNCH"

#: The phase whose end is the end of the start.
_LAST = "training step"

#: What is told -> the phases of ``hvdtrain.progress`` that it is made of. What is in none of them belongs to what was before it.
_PHASES: Mapping[str, tuple[str, ...]] = {
    "imports": ("importing the recipe",),
    "recipe": ("building the recipe",),
    "connecting": ("connecting the ranks",),
    "set-up": ("setting up", "comparing the ranks' set-up"),
    "weights": ("looking for a checkpoint", "initial broadcast", "taking over what the other ranks hold"),
    "files": ("ready to train",),
    "first batch": ("data loading",),
    "first step": (_LAST,),
}
_LABELS = {phase: label for label, phases in _PHASES.items() for phase in phases}

#: What takes less is not told in the sentence.
_TELLING_S = 0.05


@dataclass(frozen=True)
class Startup:
    """Seconds of each phase, in the order in which they came."""

    phases: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    def text(self) -> str:
        """One sentence; phases too short to matter are left out."""
        parts = [f"{seconds:.1f} {label}" for label, seconds in self.phases.items() if seconds >= _TELLING_S]
        return f"first step after {self.total_s:.1f} s: {', '.join(parts)}"


@dataclass
class Recorder:
    """Told of every phase that this rank enters, until its first step is over; then it tells ``done``, once.

    Args:
        done: gets the result, in the training thread.
        before: what went before this process's first phase (``before_now``).
    """

    done: Callable[[Startup], None]
    before: Mapping[str, float]
    _marks: list[tuple[str, float]] = field(default_factory=lambda: [("python", time.monotonic())])

    def entered(self, phase: str) -> None:
        """The rank enters ``phase``, now."""
        if self._marks[-1][0] == "over":
            return
        is_over = self._marks[-1][0] == _LAST
        self._marks.append(("over" if is_over else phase, time.monotonic()))
        if is_over:
            self.done(summed(self.before, self._marks))


def summed(before: Mapping[str, float], marks: list[tuple[str, float]]) -> Startup:
    """The phases with their names for people: ``marks`` are phases with the times at which they began, the last one an end. Pure."""
    phases = dict(before)
    label = "python"
    for (phase, began_at), (_, ended_at) in pairwise(marks):
        label = _LABELS.get(phase, label)
        phases[label] = phases.get(label, 0.0) + ended_at - began_at
    return Startup(phases)


def launch(began_at: float, launched_at: float) -> str:
    """The value of ``LAUNCH``."""
    return f"{began_at:.3f} {launched_at:.3f}"


def before_now(told: str, *, now: float, age_s: float) -> dict[str, float]:
    """What went before: the hosts' answers, the launcher, and Python with our own modules. Pure.

    Args:
        told: the value of ``LAUNCH``; empty if something else started this rank, and the time before it is unknown.
        now: as ``time.time()`` counts.
        age_s: seconds since this process began.
    """
    try:
        began_at, launched_at = map(float, told.split())
    except ValueError:
        return {"python": age_s}
    # Clocks of two hosts may differ.
    launch_s = max(0.0, now - age_s - launched_at)
    return {"preparing": max(0.0, launched_at - began_at), "launch": launch_s, "python": age_s}


def process_age_s() -> float:
    """Seconds since this process was made; 0 where the kernel does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
