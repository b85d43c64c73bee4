"""The figures of the steps since the last log line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain import metrics
from hvdtrain.clock import Clock
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.metrics import Mean, Means

#: in the reduction of a window
_WAITED = "speed/data_wait"


def reduce(means: Means, comm: Communicator, *, name: str) -> Means:
    """Collective. The means over the samples of all ranks; every rank must bring the same names."""
    return metrics.reduce(means, lambda numbers: comm.allreduce(numbers, name=name).tolist())


class Window:
    """Gathers what the steps of one rank give, until ``close``. The time of the steps goes to ``clock``."""

    def __init__(self) -> None:
        self._means: Means = {}
        self.clock = Clock()
        #: seconds that a rank waited for data in this window, the mean over all ranks; and in all windows of all their seconds
        self._waited_s, self._all_waited_s, self._all_s = 0.0, 0.0, 0.0

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
        waited = {_WAITED: Mean(self.clock.waited_s, 1)}
        means = reduce({**self._means, **more, **waited}, comm, name="metrics/train")
        self._waited_s = means.pop(_WAITED).value
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

    def close(self) -> dict[str, float]:
        """Samples a second, and the part of the time in which ranks waited for data; the next window begins."""
        self._means = {}
        samples_per_s, seconds = self.clock.end_window()
        self._all_waited_s += self._waited_s
        self._all_s += seconds
        return {"speed/samples_per_s": samples_per_s, "speed/data_wait": _part(self._waited_s, seconds)}

    @property
    def data_wait(self) -> float:
        """The part of the time of all windows so far in which ranks waited for data."""
        return _part(self._all_waited_s, self._all_s)


def _part(waited_s: float, seconds: float) -> float:
    return min(1.0, waited_s / seconds) if seconds else 0.0
