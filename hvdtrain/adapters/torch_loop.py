"""A user's own PyTorch loop on several ranks: when ``backward()`` returns, the gradients are those of the global batch."""

from __future__ import annotations

import math
import socket
from functools import partial
from typing import Any

import torch

from hvdtrain.adapters import blame, torch_norm
from hvdtrain.adapters.torch_reducer import GradientReducer
from hvdtrain.comm import Communicator
from hvdtrain.data.sampler import Slice
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.update import Update


class Loop:
    """Watches the backward passes of ``model`` and reduces its gradients within the last one of each update.

    Args:
        model, optimizer: as they are; nothing of theirs is wrapped.
        accumulate: backward passes of one update.
        number: of this model among those that the script prepares.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        update: Update,
        accumulate: int,
        number: int = 0,
    ) -> None:
        self.model, self.comm, self.update, self.accumulate = model, comm, update, accumulate
        prefix = f"model {number}/" if number else ""
        self.reducer = GradientReducer(model, update, f"{prefix}gradient/")
        if update.sync_batch_norm:
            torch_norm.synchronize(model, self.reducer.hvd, f"{prefix}batch norm/")
        self._named = list(model.named_parameters())
        self._hooks: dict[str, Any] = {}
        self._peers = update.peers(comm.world.rank, comm.world.size)
        #: what this rank's next mean gradient counts for; without a loader, as much as any other's
        self._part = update.factor(1.0 / comm.world.size, self._peers)
        self._is_filler, self._counted, self._units = False, False, 0.0
        #: samples since the moving statistics were last made equal, as parts of batches
        self._seen = 0.0
        self._largest: dict[str, torch.Tensor] = {}
        self._passes, self._done, self._left = accumulate, 0, 0
        self._announced: Any = None
        self._batch_passes, self._passes_per_batch = 0, 1
        self._kept: list[torch.Tensor] = []
        self._carries_sum = False  # whether what an earlier update left in the gradients was reduced already
        self._queued, self._reduced = False, False
        self._arm(accumulate)
        self._known = {id(parameter) for _, parameter in self._named}
        self._step_hooks = (
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._arm(self.accumulate)),
        )

    def close(self) -> None:
        """Let go of the model and the optimizer, which are then prepared anew."""
        for hook in (*self._hooks.values(), *self._step_hooks):
            hook.remove()
        self.reducer.close()

    def announce(self, loader: object, part: Slice, left: int) -> None:
        """The next batch, of ``loader``, is ``part`` of a global one, and the first of ``left``."""
        if self._reduced or not self._done or left > self._left:  # else an update is under way
            self._arm(min(self.accumulate, left * self._passes_per_batch))
        self._batch_passes = 0
        self._is_filler = not len(part.indices)
        weighted = 0.0 if self._is_filler else self.update.factor(part.weight, self._peers)
        if self._announced not in (None, loader) and self._left > 1 and weighted != self._part:
            raise UsageError(
                "two prepared loaders are read at once, and this rank's parts of their batches differ",
                "give them one batch_size, or read them as one data set",
            )
        self._kept = [tensor.clone() for tensor in torch_norm.own_statistics(self.model)] if self._is_filler else []
        self._announced, self._left, self._counted = loader, left, False
        self._set_part(weighted)

    def count(self, units: float) -> None:
        """The next loss is a mean over ``units`` things (tokens, class weights) instead of samples."""
        if self.accumulate > 1:
            raise UsageError(
                "count() and accumulate exclude each other", "accumulate by larger batches, or use a recipe's Update"
            )
        if self.update.op != "exact":
            raise UsageError(f"count() weights the ranks' means, which op={self.update.op!r} does not", "use op='exact'")
        self._counted = True
        self._set_part(0.0 if self._is_filler else float(units))

    def settle(self) -> None:
        """Collective. Average the moving statistics of normalisation layers that are not synchronised."""
        torch_norm.average_statistics(self.model, self.comm, self._seen)
        self._seen = 0.0

    def _set_part(self, part: float) -> None:
        self._part = part
        torch_norm.set_part(self.model, part, present=not self._is_filler)

    def _arm(self, passes: int) -> None:
        """An update of ``passes`` backward passes begins."""
        self._carries_sum = self._carries_sum or self._reduced
        self.reducer.begin(passes)
        self._passes, self._done, self._reduced = passes, 0, False
        self._units, self._largest = 0.0, {}
        for name, parameter in self._named:
            if parameter.requires_grad and name not in self._hooks:
                hook = partial(self._on_gradient, name, parameter)
                self._hooks[name] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, name: str, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Weight a gradient before it is added up and reduced; note whether it is finite."""
        if self._reduced and parameter.grad is None:  # the last update was left out, as a GradScaler does
            self._arm(self.accumulate)
        if self._reduced:
            raise UsageError(
                "a backward pass came after this update's gradients had been reduced",
                "say how many there are before optimizer.step(): prepare(..., accumulate=N)",
            )
        if not self._queued:  # the engine calls back when this pass is over
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        if self._carries_sum and parameter.grad is not None:  # it is the same on all ranks, and will be added up again
            parameter.grad.div_(self._peers)
        weighted = gradient * self._part if self._part else torch.zeros_like(gradient)  # of nothing it may be NaN
        values = weighted._values() if weighted.is_sparse else weighted
        if values.numel():
            largest = torch.linalg.vector_norm(values, math.inf)
            self._largest[name] = torch.maximum(largest, self._largest.get(name, largest))
        return weighted

    def _after_backward(self) -> None:
        self._queued, self._announced, self._carries_sum = False, None, False
        for tensor, kept in zip(torch_norm.own_statistics(self.model) if self._kept else (), self._kept, strict=True):
            tensor.copy_(kept)
        self._kept = []
        self._units += self._part if self._counted else 0.0
        self._seen += self._part
        self._done += 1
        self._batch_passes += 1
        self._passes_per_batch = max(self._passes_per_batch, self._batch_passes)
        late = [name for name, parameter in self._named if parameter.grad is not None and parameter.requires_grad]
        if late := [name for name in late if name not in self._hooks]:
            raise UsageError(
                f"{late[0]} was unfrozen after the loader gave this batch: its gradient is this rank's alone",
                "freeze and unfreeze layers before an epoch, or right after optimizer.step()",
            )
        if self._done == self._passes:
            self._reduce()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective if this rank's last backward passes did not come (it had nothing to learn from)."""
        if any(id(parameter) not in self._known for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError("the optimizer has parameters that it had not in prepare()", "prepare() the model again")
        if not self._reduced and not (self._carries_sum and not self._done and self._has_gradient()):
            self._reduce()  # unless step() is called again, with the gradients of the last one
        # Here and not before: a GradScaler calls step() only if all is finite, or leaves that to a fused optimizer.
        if not self.reducer.not_finite or getattr(optimizer, "found_inf", None) is not None:
            return
        if self.update.process_sets:
            raise HvdtrainError(
                f"the gradient of {self.reducer.not_finite[0]} is not finite on a rank of this one's process set"
            )
        mine = [name for name, largest in self._largest.items() if not bool(largest.isfinite())]
        blame(mine, None, socket.gethostname(), self.comm)

    def _has_gradient(self) -> bool:
        return any(parameter.grad is not None for _, parameter in self._named)

    def _reduce(self) -> None:
        place = float(self._left)
        units, places, squares = self.reducer.finish([self._units, place, place * place], self._largest)
        self._reduced = True
        if squares * self._peers != places * places and not self.update.process_sets:  # then they are not all the same
            left = self.comm.allgather(self._left, name="gradient/batches")
            raise HvdtrainError(
                f"the ranks have come together from different batches: with {', '.join(map(str, left))} batches left to read "
                f"on ranks 0 to {len(left) - 1}",
                "a rank that leaves a batch out must do so on all ranks",
            ).everywhere()
        factor = self.update.postscale / (units or 1.0)
        for _, parameter in self._named:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)
