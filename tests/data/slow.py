"""Data sets that loader processes can have: defined in a module of their own."""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

import numpy as np

SAMPLES = 203


class Python:
    """Samples of which each keeps the interpreter for ``work`` rounds, or waits for ``seconds``."""

    def __init__(self, work: int = 0, seconds: float = 0.0, width: int = 5) -> None:
        self.work, self.seconds, self.width = work, seconds, width

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        for _ in range(self.work):
            pass
        if self.seconds:
            time.sleep(self.seconds)
        return np.full(self.width, index, np.float32), index


class Fails(Python):
    """One sample cannot be read."""

    def __init__(self, bad: int, how: str = "raise") -> None:
        super().__init__()
        self.bad, self.how = bad, how

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            if self.how == "odd":
                raise OddError(1, 2)
            if self.how == "exit":
                sys.exit(3)
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if self.how == "stop":
                raise StopIteration
            if self.how == "gone":
                os._exit(3)
            raise OSError("bad disk")
        return super().__getitem__(index)


class OnlyHere(Python):
    """Can be loaded by the process that made it alone."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds)
        self.home = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.home:
            raise OSError("no licence here")
        return super().__getitem__(index)


class OddError(Exception):
    """Cannot be pickled: its arguments are not those of its constructor."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"odd {one}{other}")


class WithPid(Python):
    """Tells which process loads."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], os.getpid()


class Epochs(Python):
    """Other samples in each epoch."""

    epoch = 0

    def at_epoch(self, epoch: int) -> Epochs:
        new = copy.copy(self)
        new.epoch = epoch
        return new

    def take(self, indices: np.ndarray) -> Any:
        return indices * 1000 + self.epoch


class SlowAtFirst(Epochs):
    """In the first epoch each batch takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds)

    def take(self, indices: np.ndarray) -> Any:
        if not self.epoch:
            time.sleep(self.seconds)
        return super().take(indices)


class Heavy(Epochs):
    """Does not fit into a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = np.zeros(4 << 20, np.uint8)


def sleep(*_: Any) -> None:
    """A process that does nothing."""
    time.sleep(60)
