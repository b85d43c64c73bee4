"""The contract between the training loop and a framework: one replica of one model, one update at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from numpy.typing import NDArray

from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Means
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.wanted import Pipelining


@runtime_checkable
class Adapter(Protocol):
    """One replica of a model in one framework.

    What is fixed for the whole run (loss, metrics, an ``Update``) goes to the constructor of an adapter.
    """

    #: "torch", "tensorflow" or "numpy": which Horovod the ranks may meet over
    framework: str

    def setup(self, comm: Communicator, exchange: Exchange = Exchange()) -> str:  # noqa: B008 - a frozen value
        """Collective. Pin the device, wire the exchange of gradients over ``comm.world``. Called before all else.

        Called again where the ranks of an elastic job have changed, over a Horovod that was started anew. Model and optimizer
        stay, as the last whole step left them; what an interrupted evaluation has gathered is dropped.

        Returns:
            how gradients travel, and why so; empty where they do not.

        Raises:
            UsageError: they cannot travel as ``exchange`` says.
        """

    def sync(self, root: int = 0) -> None:
        """Collective. Copy the model's and the optimizer's state from ``root`` to every rank."""

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every parameter, buffer and optimizer state that must be the same on all ranks: by name, in host memory."""

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        """Collective. One update: forward, backward, reduce, apply.

        The gradient applied is the sum over ranks of ``weight`` times the mean gradient of this rank's samples, which
        is the exact mean over the global batch. A rank with an empty batch has weight 0 and takes part with zeros.

        Every reduction comes before anything is applied: in an elastic job, a step that the loss of a rank interrupts leaves the
        model, its moving statistics and the optimizer as they were.

        Args:
            batch: this rank's arrays, samples on the first axis, possibly none.
            lr: learning rate of this update; None leaves the optimizer's own.
            weight: this rank's samples over the global batch's.
            seed: of the random layers in this step on this rank; None goes on with their streams.

        Returns:
            means over this rank's samples, the same names on every rank and at every step.

        Raises:
            HvdtrainError: a gradient is not finite (on all ranks alike): it names the rank and the tensor.
        """

    def settle(self, *, saving: bool = False) -> None:
        """Collective. Make equal what each rank gathers by itself (moving statistics of normalisation layers).

        Called before the model is evaluated, saved or compared. ``saving``: the primary's ``snapshot`` is to have all that the
        other ranks hold too (what they owe after compressed steps, which is as large as the model).
        """

    def eval_step(self, batch: Any) -> Means:
        """Means over this rank's samples. No collective."""

    def eval_end(self) -> Mapping[str, float]:
        """Collective. Values over all ranks of the metrics that keep a state of their own, which begins anew."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy model and optimizer to host memory. The training goes on when this returns.

        The function returned writes the copy into an empty directory, from any thread, as long as no other snapshot is
        taken (so that they can use the same memory), in the framework's own format: the
        weights alone in a file ``model.*`` that the framework reads without us, everything without pickle or in a form
        that is read without running what it says.
        """

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote; ``sync`` follows where there are other ranks.

        What the recipe sets otherwise than it did then (a learning rate) is as it says now.
        """


@runtime_checkable
class Splittable(Adapter, Protocol):
    """An adapter whose model can be split over several ranks."""

    def alike(self) -> Communicator:
        """The ranks that hold the same tensors as this one, once it is split."""

    def arrange(self, comm: Communicator, wanted: Pipelining, sample: Callable[[Mesh], Any]) -> tuple[Mesh, str]:
        """Collective. Split the model; before ``setup``. Who has which part, and how it was split, as text.

        Args:
            sample: gives a replica's batch, to measure layers on.

        Raises:
            UsageError: it cannot be split so over these ranks.
        """


def refuse_sum(loss: object) -> None:
    """Raise UsageError for a loss object that says it sums over the samples: its gradient would grow with a rank's part."""
    if getattr(loss, "reduction", None) == "sum":
        raise UsageError(
            f"the loss {type(loss).__name__} sums over the samples (reduction='sum'), it must be their mean",
            "leave reduction at its default",
        )


class NotFiniteError(HvdtrainError):
    """Gradients are not finite, on all ranks alike; ``rank`` is the first that brought such ones, None if none did."""

    def __init__(self, message: str, hint: str = "", rank: int | None = None) -> None:
        super().__init__(message, hint)
        self.rank = rank

    def with_samples(self, mine: str, comm: Communicator) -> HvdtrainError:
        """Collective. The error with the samples that the rank to blame had in this step; ``mine``: this rank's."""
        everyone = comm.allgather(mine, name="samples of the step")
        whose = f"in the global batch that begins with {everyone[0]}" if self.rank is None else f"in its {everyone[self.rank]}"
        return HvdtrainError(f"{self.message}, {whose}", self.hint).everywhere()


def blame(tensors: Sequence[str], loss: float | None, host: str, comm: Communicator) -> NoReturn:
    """Collective. Raise the error of gradients that are not finite, on all ranks alike.

    Args:
        tensors: the parameters whose gradients are not finite on this rank before they are reduced.
        loss: of this rank's samples, if it is known.
        host: this rank's.
    """
    everyone = comm.allgather((list(tensors), loss, host), name="gradient/blame")
    culprits = [(rank, *facts) for rank, facts in enumerate(everyone) if facts[0]]
    if not culprits:
        raise NotFiniteError(
            "the gradients are not finite, and those of each rank are when they are computed again: their sum over the ranks or its "
            "norm overflows, or the loss is another one each time",
            "lower the learning rate or the scale of the loss; --resume auto goes on from the last checkpoint",
        ).everywhere()
    rank, names, loss, host = culprits[0]
    more = f" and of {len(names) - 1} more tensors" if len(names) > 1 else ""
    where = "" if loss is None else f", where the loss is {loss:.4g}"
    also = f"; likewise on rank {', '.join(str(other[0]) for other in culprits[1:])}" if len(culprits) > 1 else ""
    raise NotFiniteError(
        f"the gradient of {names[0]}{more} is not finite on rank {rank} ({host}){where}{also}",
        "check the data of this step, or lower the learning rate; --resume auto goes on from the last checkpoint",
        rank,
    ).everywhere()


_PAIRS = (
    "several inputs: ((a, b), targets) or ({'a': a, 'b': b}, targets); "
    "of samples that are dicts make pairs: (sample['x'], sample['y'])"
)


def batch_pair(batch: Any) -> tuple[Any, Any, int]:
    """Inputs, targets and the number of samples of a batch ``(inputs, targets)``.

    Raises:
        UsageError: the batch is no such pair.
    """
    if not (isinstance(batch, tuple) and len(batch) == 2):
        found = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
        raise UsageError(
            f"a batch must be a pair (inputs, targets), got {found}",
            _PAIRS,
        )
    inputs, targets = batch
    first = targets
    while isinstance(first, (tuple, dict)):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    return inputs, targets, len(first)
