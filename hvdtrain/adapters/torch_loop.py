"""A user's own PyTorch loop on several ranks: when ``backward()`` returns, the gradients are those of the global batch."""

from __future__ import annotations

import math
import socket
from functools import partial
from typing import Any

import torch

from hvdtrain.adapters import blame
from hvdtrain.adapters.torch_reducer import GradientReducer
from hvdtrain.comm import Communicator
from hvdtrain.data.sampler import Slice
from hvdtrain.errors import UsageError
from hvdtrain.update import Update


class Loop:
    """Watches the backward passes of ``model`` and reduces its gradients within the last one of each update.

    Args:
        model, optimizer: as they are; nothing of theirs is wrapped.
        accumulate: backward passes of one update.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, update: Update, accumulate: int
    ) -> None:
        self.model, self.comm, self.update, self.accumulate = model, comm, update, accumulate
        self.reducer = GradientReducer(model, update)
        self._named = list(model.named_parameters())
        self._hooks: dict[str, Any] = {}
        #: what the mean of a batch without a loader counts for
        self._even = 1.0 / comm.world.size
        self._peers = update.peers(comm.world.rank, comm.world.size)
        self._weight, self._counted, self._units = self._even, False, 0.0
        self._sums: dict[str, torch.Tensor] = {}
        self._passes, self._done, self._left = accumulate, 0, 0
        self._queued, self._reduced = False, False
        self._arm(accumulate)
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._arm(self.accumulate))

    def announce(self, part: Slice, left: int) -> None:
        """The next batch is ``part`` of a global one, and the first of ``left``."""
        if self._reduced or not self._done or left > self._left:  # else an update is under way
            self._arm(min(self.accumulate, left))
        self._left, self._weight, self._counted = left, part.weight, False

    def count(self, units: float) -> None:
        """The next loss is a mean over ``units`` things (tokens, class weights) instead of samples."""
        if self.accumulate > 1:
            raise UsageError(
                "count() and accumulate exclude each other", "accumulate by larger batches, or use a recipe's Update"
            )
        self._weight, self._counted = float(units), True

    def _arm(self, passes: int) -> None:
        """An update of ``passes`` backward passes begins."""
        self.reducer.begin(passes)
        self._passes, self._done, self._reduced = passes, 0, False
        self._units, self._sums = 0.0, {}
        for name, parameter in self._named:
            if parameter.requires_grad and name not in self._hooks:
                self._hooks[name] = parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Weight a gradient before it is added up and reduced; note whether it is finite, which costs no pass of its own."""
        if self._reduced:
            raise UsageError(
                "a backward pass came after this update's gradients had been reduced",
                "say how many there are before optimizer.step(): prepare(..., accumulate=N)",
            )
        if not self._queued:  # the engine calls back when this pass is over
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        weighted = gradient * self.update.factor(self._weight, self._peers)
        total = (weighted._values() if weighted.is_sparse else weighted).sum()
        self._sums[name] = total if name not in self._sums else self._sums[name] + total
        return weighted

    def _after_backward(self) -> None:
        self._queued = False
        self._units += self._weight if self._counted else 0.0
        self._done += 1
        if self._done == self._passes:
            self._reduce()

    def _before_step(self) -> None:
        """Collective if this rank's last backward passes did not come (it had nothing to learn from)."""
        if not self._reduced:
            self._reduce()
        if self.reducer.not_finite:  # here and not before: what scales the loss calls step() only if all is finite
            mine = [name for name, total in self._sums.items() if not bool(total.isfinite())]
            blame(mine, math.nan, socket.gethostname(), self.comm)

    def _reduce(self) -> None:
        units = self.reducer.finish(self._units, self._sums)
        self._reduced = True
        factor = self.update.postscale / (units or 1.0)
        for _, parameter in self._named:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)
