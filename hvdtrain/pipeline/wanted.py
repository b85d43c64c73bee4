"""What the user asks of pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.pipeline.schedule import Name

#: Micro-batches for each stage where the user has not said: a pipeline then idles for less than a fifth of its time (Huang et al.,
#: "GPipe", NeurIPS 2019, recommends four).
_MICROS_PER_STAGE = 4


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
        if (self.virtual_stages > 1) != (self.schedule == "interleaved"):
            raise UsageError(
                f"schedule {self.schedule} with {self.virtual_stages} virtual stages on each rank",
                "--schedule interleaved goes with --virtual-stages 2 or more, the others with 1",
            )

    def micro_size(self, count: int, most: int | None) -> int:
        """Samples of each micro-batch but the last, of ``count`` samples; ``most``: the recipe's own."""
        if most is not None:
            return most
        parts = self.micro_batches or (1 if self.stages == 1 else _MICROS_PER_STAGE * self.stages)
        return max(1, -(-count // parts))
