"""How fast samples are done."""

from __future__ import annotations

import time
from dataclasses import dataclass


class Clock:
    """Samples and the time of loading and updating them; evaluations and checkpoints lie between the laps."""

    def __init__(self) -> None:
        self._run, self._window = _Stretch(), _Stretch()
        #: seconds of this window in which a step waited for its batch
        self.waited_s = 0.0
        self._is_first = True
        self.mark()

    def mark(self) -> None:
        """The next lap begins."""
        self._marked = time.perf_counter()

    def loaded(self) -> None:
        """The batch of this lap is there."""
        self.waited_s += time.perf_counter() - self._marked

    def lap(self, samples: int = 0) -> None:
        """A lap ends, in which ``samples`` samples were done, and the next one begins."""
        now = time.perf_counter()
        self._window.add(samples, now - self._marked)
        if not self._is_first:
            self._run.add(samples, now - self._marked)
        self._is_first, self._marked = False, now

    def end_window(self) -> tuple[float, float]:
        """Samples a second since the last window, and its seconds; the next one begins."""
        window, self._window, self.waited_s = self._window, _Stretch(), 0.0
        return window.samples_per_s, window.seconds

    @property
    def samples_per_s(self) -> float:
        """Over the whole run without its first lap."""
        return self._run.samples_per_s


@dataclass
class _Stretch:
    samples: int = 0
    seconds: float = 0.0

    def add(self, samples: int, seconds: float) -> None:
        self.samples += samples
        self.seconds += seconds

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0
