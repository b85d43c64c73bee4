"""Where a training run stands. Plain numbers, so that it can be resumed at any number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """Optimizer updates done, and the samples of the data set that made them up."""

    step: int = 0
    epoch: int = 0
    #: samples of the current epoch that are done: the sampler's whole state together with ``epoch``
    position: int = 0
    #: samples done in all
    samples: int = 0

    def after(self, samples: int) -> TrainState:
        """The state after one more step on ``samples`` samples of the current epoch."""
        return TrainState(self.step + 1, self.epoch, self.position + samples, self.samples + samples)

    def next_epoch(self) -> TrainState:
        """The state at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` on a foreign file."""
        return cls(**{name: int(values[name]) for name in cls.__dataclass_fields__})
