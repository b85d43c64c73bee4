"""The contract between the pipeline and a framework: the part of a model that one rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdtrain.comm import Communicator, Message
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Means
from hvdtrain.update import Update


@dataclass(frozen=True)
class Cost:
    """What one layer takes: bytes of its parameters, seconds and bytes of activations of one micro-batch (0: not measured)."""

    name: str
    parameters: int
    seconds: float = 0.0
    activations: int = 0


@dataclass(frozen=True)
class Place:
    """Where a rank's part is in the whole model.

    Attributes:
        chunks: (first, end) of the layers of each of its virtual stages, in order.
        is_first, is_last: whether the first chunk begins the model, and the last one ends it.
        seed: what the initial weights of each layer are drawn from, with the layer's number.
    """

    chunks: tuple[tuple[int, int], ...]
    is_first: bool
    is_last: bool
    seed: int


@dataclass(frozen=True)
class Group:
    """Whom a rank's part meets with.

    Attributes:
        peers: the ranks that have the same part.
        sets: the ranks of each stage, which is what Horovod is to know of all of them.
        line: the ranks of this rank's pipeline, in order of their stages.
    """

    peers: Communicator
    sets: tuple[tuple[int, ...], ...]
    line: Communicator


@dataclass(frozen=True)
class Micro:
    """A micro-batch: arrays with the samples on the first axis. ``part`` is what its mean gradient counts for in the step's sum
    over all micro-batches and replicas, where the loss is a mean over samples."""

    inputs: Any
    targets: Any
    count: int
    part: float


@dataclass(frozen=True)
class Mode:
    """What micro-batches go through a pipeline for.

    Attributes:
        training: to get gradients; else for the figures alone.
        reducing: ``reduce`` follows, and may begin as gradients come; else they stay on this rank.
        recompute: keep only what comes into a chunk, and compute its activations again on the way back.
    """

    training: bool
    reducing: bool = True
    recompute: bool = False


class Part(Protocol):
    """What a rank has of a model, in its framework. Messages carry activations forward and their gradients back."""

    framework: str
    update: Update
    #: names of the figures, "loss" first
    figures: tuple[str, ...]

    def seed(self) -> int:
        """What the framework's random numbers begin from."""

    def costs(self, sample: Any, *, measured: bool) -> list[Cost]:
        """Of each layer of the whole model. ``measured``: by running one after the other on ``sample``, a micro-batch."""

    def build(self, place: Place) -> None:
        """Make the layers that this rank has, and let go of the others."""

    def connect(self, group: Group, exchange: Exchange) -> str:
        """Collective. Wire the sums of gradients over the ranks that have the same part; how they travel."""

    def begin(self, micros: Sequence[Micro], mode: Mode, *, lr: float | None = None, seed: int | None = None) -> None:
        """Before the first micro-batch. ``lr`` and ``seed``: as those of an adapter's ``train_step``."""

    def forward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        """Activations of a chunk; None after the last one, which takes the loss and the figures."""

    def backward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        """Add up gradients of the parameters; the gradient of what came in, None where that was the batch."""

    def means(self) -> Means:
        """The figures since ``begin``; without samples on ranks that do not have the end of the model."""

    def reduce(self) -> tuple[float, float]:
        """Collective. Sum the gradients over the ranks that have the same part, and those of tied layers over the pipeline.

        Returns:
            the sum of their squares, each parameter counted on one stage only; and the units that the loss is a mean over, as
            part of the global batch, where the end of the model is: elsewhere 0.
        """

    def not_finite(self) -> list[str]:
        """The parameters whose gradients of the last passes, before any reduction, are not finite."""

    def apply(self, factor: float) -> None:
        """Update the parameters with the reduced gradients times ``factor``, then cut off at the update's ``clip_value``."""

    def settle(self) -> None:
        """Collective. Make equal what each of the ranks with the same part gathers by itself."""

    def metric_values(self) -> Mapping[str, float]:
        """Collective over the ranks with the same part. Of metrics that keep a state."""

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """As an adapter's."""

    def share(self) -> None:
        """Collective. Tied parameters as the first stage has them, then all as the first replica has them."""

    def snapshot(self) -> Callable[[Path, int, int], None]:
        """A copy; the function writes it into a directory as part *i* (from 0) of *n*."""

    def check(self, directory: Path, names: Mapping[str, str]) -> None:
        """Raise ValueError if the parts in ``directory`` are not those of a model with ``names`` and shapes."""

    def load(self, directory: Path) -> None:
        """Read this rank's layers from whichever parts have them."""
