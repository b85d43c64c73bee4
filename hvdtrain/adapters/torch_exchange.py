"""What the PyTorch adapter asks of whatever carries its gradients between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hvdtrain.adapters import torch_fused


@dataclass(frozen=True)
class Summed:
    """What one reduction over the ranks gave, the same on all ranks.

    ``norm`` is that of the summed gradients of all parameters together, where adding them up told it.
    """

    numbers: list[float]
    norm: float | None = None


class GradientExchange(Protocol):
    """Sums gradients over ranks: ``begin`` before a step's first backward pass, ``finish`` after its last, then ``update``."""

    def begin(self, passes: int) -> None:
        """The next ``passes`` backward passes make one sum."""

    def finish(self, numbers: Sequence[float]) -> Summed:
        """Collective. Sum the gradients, and ``numbers``. One that no rank has stays None."""

    def gradients(self) -> list[torch.Tensor]:
        """The summed gradients that this rank's ``update`` uses, in memory that may be changed."""

    def update(self) -> None:
        """Collective where ranks update parts. One update of the optimizer from ``gradients``."""

    def pause(self) -> None:
        """Whatever backward passes follow before the next ``begin`` stay on this rank."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Collective. Copy ``root``'s values to every rank, in place; the same shapes on all ranks."""

    def settle(self) -> None:
        """Collective where ranks update parts. The optimizer's state is whole, to be read."""

    def adopt(self) -> None:
        """Collective where ranks update parts. The optimizer's state was changed from outside."""

    def close(self) -> None:
        """Let go of the model and the optimizer."""


class Alone:
    """A single process: its gradients are the sums."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def begin(self, passes: int) -> None:
        pass

    def finish(self, numbers: Sequence[float]) -> Summed:
        return Summed(list(numbers))

    def gradients(self) -> list[torch.Tensor]:
        return own_gradients(self._optimizer)

    def update(self) -> None:
        torch_fused.step(self._optimizer)

    def pause(self) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def adopt(self) -> None:
        pass

    def close(self) -> None:
        pass


def own_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The elements of the gradients that the optimizer finds, shared with them; of sparse ones those that they have."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                parameter.grad = gradient.coalesce()  # the same row may come several times
                if group.get("fused"):  # which takes no sparse gradients
                    group["fused"] = None
                gradient = parameter.grad._values()
            found.append(gradient)
    return found


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient, shared with it; of a sparse one those that it has."""
    return gradient._values() if gradient.is_sparse else gradient


def sparse_weights(model: torch.nn.Module) -> set[int]:
    """The parameters whose gradients are sparse, by their modules: a rank without samples must know it too."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds) and module.sparse}
