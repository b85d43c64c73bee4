"""Sums gradients over ranks with Horovod's DistributedOptimizer, while backward still runs."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.horovod import require


class GradientReducer:
    """Wires a model's parameters to Horovod; ``begin`` before the forward pass, ``finish`` before the optimizer's step.

    Horovod's wrapper makes a new optimizer out of the groups of the one it is given, without its state, and works only
    with those whose constructor allows that. So it gets a plain SGD over the same parameters and does the reductions;
    the update stays with the user's own optimizer.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        require("torch")
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self._named = list(model.named_parameters())
        self._trainable: tuple[bool, ...] = ()
        self._wrapper: Any = None

    def begin(self) -> None:
        """Follow layers that were frozen or unfrozen since the last step (on all ranks alike)."""
        trainable = tuple(parameter.requires_grad for _, parameter in self._named)
        if trainable == self._trainable:
            return
        if self._wrapper is not None:
            self._wrapper._grad_accs.clear()  # the only owner of the nodes that its hooks sit on
        self._trainable = trainable
        named = [(f"gradient/{name}", parameter) for name, parameter in self._named if parameter.requires_grad]
        if not named:
            raise UsageError("the model has no trainable parameter", "set requires_grad = True on some parameter")
        self._wrapper = self.hvd.DistributedOptimizer(
            torch.optim.SGD([parameter for _, parameter in named], lr=0.0),
            named_parameters=named,
            op=self.hvd.Sum,
            compression=_Contiguous,
            sparse_as_dense=True,  # a rank without samples has no sparse gradient to bring along
        )

    def finish(self) -> None:
        """Collective. Wait for the sums. A gradient that some ranks lack counts as zero there; one that all lack stays None.

        Horovod would make the latter zero too, and weight decay and momentum then move parameters that no rank used.
        """
        parameters = [parameter for _, parameter in self._named if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
        handle = self.hvd.allreduce_async_(used, op=self.hvd.Sum, name="gradient is used")
        self._wrapper.synchronize()
        for parameter, ranks in zip(parameters, self.hvd.synchronize(handle).tolist(), strict=True):
            if not ranks:
                parameter.grad = None


class _Contiguous:
    """A Horovod "compression" that lets gradients in any memory layout (channels last) through: Horovod takes only one."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.contiguous(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor
