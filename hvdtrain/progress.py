"""What this rank is doing at the moment: for its last words, and for the watchdog. A process is one rank, so there is one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wait:
    """A collective that this rank is in. ``tensors`` names those that are not done yet, when somebody asks.

    ``certain`` is false where the same call also computes: a traced step with its reductions inside.
    """

    what: str
    tensors: Callable[[], Sequence[str]] = tuple
    certain: bool = True

    def __str__(self) -> str:
        names = list(self.tensors())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{self.what} {', '.join(names[:3])}{more}" if names else self.what


@dataclass
class Progress:
    """The phase of a rank, the step, and when either last changed. Written by the training thread, read by others."""

    phase: str = "starting"
    #: updates done; None before this round's first
    step: int | None = None
    #: whether steps are being done: a request to stop is heard at the next vote
    training: bool = False
    wait: Wait | None = None
    moved_at: float = field(default_factory=time.monotonic)
    #: told of each phase as it is entered
    observer: Callable[[str], None] | None = None

    @property
    def where(self) -> str:
        return self.phase if self.step is None else f"{self.phase}, step {self.step}"

    def begin(self) -> None:
        """A new life: nothing is known yet."""
        self.phase, self.step, self.training, self.wait = "reading the environment", None, False, None
        self.observer = None
        self.moved()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.moved()
        if self.observer is not None:
            self.observer(phase)

    def moved(self) -> None:
        """Something was done: a step, a batch of an evaluation."""
        self.moved_at = time.monotonic()

    @contextlib.contextmanager
    def waits(self, what: str, tensors: Callable[[], Sequence[str]] = tuple, *, certain: bool = True) -> Iterator[None]:
        """While this is open, the rank is in the collective ``what``."""
        outer, self.wait = self.wait, Wait(what, tensors, certain)
        self.moved()
        try:
            yield
        finally:
            self.wait = outer
            self.moved()


HERE = Progress()
