"""What the user asks of pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError, shown
from hvdtrain.pipeline.part import Cost
from hvdtrain.pipeline.schedule import Name, check

#: Micro-batches for each stage where the user has not said: a pipeline then idles for less than a fifth of its time (Huang et al.,
#: "GPipe", NeurIPS 2019, recommends four).
_MICROS_PER_STAGE = 4

_SPLITS = ("parameters", "time", "memory")


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """
    Attributes:
        stages: ranks that share a model; 1: each rank has all of it.
        schedule: in which order micro-batches go forward and backward.
        micro_batches: parts of a replica's samples of a step (None: four for each stage).
        virtual_stages: parts of the model on each rank.
        split: "parameters", "time" or "memory": what is to be equal; or the layers of each (virtual) stage: "3,5,4".
        recompute: keep only what comes into a stage, and compute its activations again in the backward pass.
    """

    stages: int = 1
    schedule: Name = "1f1b"
    micro_batches: int | None = None
    virtual_stages: int = 1
    split: str = "parameters"
    recompute: bool = False

    def __post_init__(self) -> None:
        check(self.schedule, self.stages, 0, self.virtual_stages)
        if self.split not in _SPLITS and not self.by_hand:
            raise UsageError(f"--split {shown(self.split)}", f"use {', '.join(_SPLITS)}, or the layers of each stage: 3,5,4")

    @property
    def by_hand(self) -> bool:
        """Whether ``split`` is a list of numbers."""
        return self.split[:1].isdigit()

    def micros(self, count: int, most: int | None) -> list[slice]:
        """The micro-batches of ``count`` samples: of ``most`` each if that is given, else as many as are asked for."""
        if most is not None:
            return [slice(start, min(start + most, count)) for start in range(0, count, most)]
        asked = self.micro_batches or (1 if self.stages == 1 else _MICROS_PER_STAGE * self.stages)
        parts = min(asked, count)
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def weight(self, cost: Cost) -> float:
        """What of a layer is to be equal on all stages."""
        if self.split == "time":
            return cost.seconds
        if self.split == "memory":
            # Weights, gradients, and two states of an optimizer; a rank holds at most as many micro-batches as there are stages.
            return 4.0 * cost.parameters + self.stages * cost.activations
        return float(cost.parameters)
