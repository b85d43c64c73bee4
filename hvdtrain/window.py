"""The figures of the steps since the last log line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain import metrics
from hvdtrain.clock import Clock
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.metrics import Mean, Means


def reduce(means: Means, comm: Communicator, *, name: str) -> Means:
    """Collective. The means over the samples of all ranks; every rank must bring the same names."""
    return metrics.reduce(means, lambda numbers: comm.allreduce(numbers, name=name).tolist())


class Window:
    """Gathers what the steps of one rank give, until ``close``. The time of the steps goes to ``clock``."""

    def __init__(self) -> None:
        self._means: Means = {}
        self.clock = Clock()

    @property
    def names(self) -> tuple[str, ...]:
        """Of its figures; none if there was no step since the last log line."""
        return tuple(self._means)

    def add(self, means: Means, samples: int) -> None:
        """One more step, on ``samples`` samples of all ranks."""
        self._means = metrics.merge(self._means, means)
        self.clock.lap(samples)

    def follow(self, names: Sequence[str]) -> None:
        """Have the figures that the other ranks have: those of an interrupted reduction may be lost on some."""
        self._means = {name: self._means.get(name, Mean()) for name in names}

    def reduce(self, more: Means, comm: Communicator) -> Means:
        """Collective. The means over the samples of all ranks, with ``more`` in the same reduction."""
        means = reduce({**self._means, **more}, comm, name="metrics/train")
        self.clock.lap()  # reading the figures waits for the device, which may be many steps behind
        return means

    def bad_loss(self, loss: Mean, comm: Communicator, hosts: Sequence[str], step: int) -> HvdtrainError | None:
        """Collective. What to raise if the reduced ``loss`` is not finite: whose it was."""
        if not loss.count or math.isfinite(loss.value):  # a reduced number: all ranks decide alike
            return None
        mine = self._means.get("loss", Mean())
        bad = comm.allgather(bool(mine.count) and not math.isfinite(mine.value), name="loss/blame")
        of = ", ".join(f"rank {rank} ({hosts[rank]})" for rank, is_bad in enumerate(bad) if is_bad)
        return HvdtrainError(
            f"the training loss of {of or 'all ranks together'} is {loss.value} in the steps up to {step}",
            "lower the learning rate or check the data; --resume auto goes on from the last checkpoint, which is older",
        ).everywhere()

    def close(self) -> float:
        """Samples a second; the next window begins."""
        self._means = {}
        return self.clock.end_window()
