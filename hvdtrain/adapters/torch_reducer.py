"""Sums gradients over ranks with Horovod's DistributedOptimizer, while backward still runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.horovod import require, start
from hvdtrain.progress import HERE
from hvdtrain.update import Update


class GradientReducer:
    """Wires a model's parameters to Horovod; ``begin`` before a step's first backward pass, ``finish`` after its last.

    Horovod's wrapper makes a new optimizer out of the groups of the one it is given, without its state, and works only
    with those whose constructor allows that. So it gets a plain SGD over the same parameters and does the reductions;
    the update stays with the user's own optimizer.
    """

    def __init__(self, model: torch.nn.Module, update: Update, prefix: str = "gradient/") -> None:
        require("torch")
        import horovod.torch as hvd

        self._set = start.init(hvd, update.process_sets)
        update.check_size(hvd.size())
        self.hvd = hvd
        self._op = hvd.Adasum if update.op == "adasum" else hvd.Sum
        self._prefix = prefix
        self._named = list(model.named_parameters())
        _refuse_dtypes(self._named)
        self._sparse = _sparse_weights(model)
        if self._sparse and update.op == "adasum":
            raise UsageError("op='adasum' cannot add up sparse gradients", "use Embedding(sparse=False), or op='average'")
        self._trainable: tuple[bool, ...] = ()
        self.not_finite: list[str] = []
        self._is_open = False
        self._wrapper: Any = None

    def begin(self, passes: int) -> None:
        """The next ``passes`` backward passes make one sum; it begins within the last of them.

        Follows layers that were frozen or unfrozen since the last step (on all ranks alike).
        """
        trainable = tuple(parameter.requires_grad for _, parameter in self._named)
        if trainable != self._trainable:
            self._wire(trainable)
        if passes != self._wrapper.backward_passes_per_step or self._is_open:  # of an update that was given up
            self._wrapper.set_backward_passes_per_step(passes)
        self._is_open = True

    def close(self) -> None:
        """Take the hooks off the parameters."""
        if self._wrapper is not None:
            # The graph of a step that was interrupted may keep the nodes that they sit on: they do nothing there.
            self._wrapper.set_backward_passes_per_step(sys.maxsize)
            self._wrapper._handles.clear()
            self._wrapper._grad_accs.clear()  # else the only owner of these nodes

    def finish(self, numbers: Sequence[float], largest: Mapping[str, torch.Tensor] | None = None) -> list[float]:
        """Collective. Wait for the sums of the gradients, and return those of ``numbers``.

        ``largest`` has the largest absolute value of this rank's own gradient of a parameter; ``not_finite`` then names the
        parameters for which some rank's is not finite.

        A gradient that some ranks lack counts as zero there; one that all lack stays None. Horovod would make the latter
        zero too, and weight decay and momentum then move parameters that no rank used.
        """
        # As they were when the update began: a layer may have been frozen since, and Horovod waits for it all the same.
        wired = [named for named, is_trainable in zip(self._named, self._trainable, strict=True) if is_trainable]
        names, parameters = [name for name, _ in wired], [parameter for _, parameter in wired]
        used = [float(parameter.grad is not None) for parameter in parameters]
        facts = torch.tensor([*used, *numbers], dtype=torch.float64)
        if largest:  # what is not finite stays so when it is added up
            zero = torch.zeros_like(next(iter(largest.values())))
            facts[: len(used)] += torch.stack([largest.get(name, zero) for name in names]).detach().cpu() * 0.0
        handle = self.hvd.allreduce_async_(facts, op=self.hvd.Sum, name=f"{self._prefix}used", process_set=self._set)
        sparse = [(parameter, self._gather(name, parameter)) for name, parameter in wired if id(parameter) in self._sparse]
        with start.shutdown_explained(), HERE.waits("allreduce of", self._unfinished):
            self._wrapper.synchronize()
        for parameter, (indices, values) in sparse:
            rows, elements = self.hvd.synchronize(indices), self.hvd.synchronize(values)
            parameter.grad = torch.sparse_coo_tensor(rows[None], elements, parameter.shape, check_invariants=False).coalesce()
        self._is_open = False
        sums: list[float] = self.hvd.synchronize(handle).tolist()
        ranks = sums[: len(used)]
        self.not_finite = [name for name, count in zip(names, ranks, strict=True) if not math.isfinite(count)]
        for parameter, count in zip(parameters, ranks, strict=True):
            if not count:
                parameter.grad = None
        return sums[len(used) :]

    def pause(self) -> None:
        """Whatever backward passes follow before the next ``begin`` stay on this rank."""
        self._wrapper.set_backward_passes_per_step(sys.maxsize)

    def _unfinished(self) -> list[str]:
        """The parameters whose sums are not there yet. For another thread, while ``finish`` waits."""
        names = {id(parameter): name for name, parameter in self._named}
        waiting = [
            (id(parameter), handle) for parameter, (handle, _) in list(self._wrapper._handles.items()) if handle is not None
        ]
        return [names[which] for which, handle in waiting if not self._is_done(handle)]

    def _is_done(self, handle: int) -> bool:
        try:
            return bool(self.hvd.poll(handle))
        except (RuntimeError, ValueError):  # released already
            return True

    def _wire(self, trainable: tuple[bool, ...]) -> None:
        self.close()
        self._trainable = trainable
        named = [(f"{self._prefix}{name}", parameter) for name, parameter in self._named if parameter.requires_grad]
        if not named:
            raise UsageError("the model has no trainable parameter", "set requires_grad = True on some parameter")
        dense = [(name, parameter) for name, parameter in named if id(parameter) not in self._sparse]
        self._wrapper = self.hvd.DistributedOptimizer(
            torch.optim.SGD([{"params": [parameter for _, parameter in dense]}], lr=0.0),
            named_parameters=dense,
            op=self.hvd.Sum,
            compression=_Contiguous,
            sparse_as_dense=True,  # a surprise: who has it otherwise is in _sparse
            process_set=self._set,
        )
        self._wrapper.op = self._op  # given at the start, Adasum would select a wrapper that reduces SGD's updates instead

    def _gather(self, name: str, parameter: torch.nn.Parameter) -> tuple[Any, Any]:
        """Begin to gather the rows that this rank touched; a rank without samples brings none along."""
        gradient = parameter.grad
        if gradient is None:
            rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        gather = self.hvd.allgather_async
        return (
            gather(rows.contiguous(), name=f"{self._prefix}{name}/rows", process_set=self._set),
            gather(values.contiguous(), name=f"{self._prefix}{name}/values", process_set=self._set),
        )


def _refuse_dtypes(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    allowed = (torch.float16, torch.float32, torch.float64)
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in allowed:
            raise UsageError(
                f"the parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, whose gradients Horovod cannot add up",
                "keep the parameters in float32, and compute in another precision: Update(precision='bfloat16'), torch.autocast",
            )


def _sparse_weights(model: torch.nn.Module) -> set[int]:
    """The parameters whose gradients are sparse, by their modules: a rank without samples must know it too."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds) and module.sparse}


class _Contiguous:
    """A Horovod "compression" that lets gradients in any memory layout (channels last) through: Horovod takes only one."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.contiguous(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor
