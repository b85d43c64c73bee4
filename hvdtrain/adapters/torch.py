"""PyTorch: any module, any optimizer, gradients reduced by Horovod while backward still runs."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.adapters import batch_pair, refuse_sum
from hvdtrain.adapters.torch_reducer import GradientReducer
from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.metrics import Mean, Means

#: a figure of (output, target): a scalar, the mean over the samples of the batch
Figure = Callable[[Any, Any], torch.Tensor]


class TorchAdapter:
    """One replica of a ``torch.nn.Module``.

    Args:
        model: called with the inputs of a batch: one tensor, or the members of a tuple or a dict of them.
        optimizer: over the model's parameters. It stays as it is; its state goes into checkpoints.
        loss: ``loss(output, target)``, a scalar that is the mean over the samples.
        metrics: more figures of (output, target), by name, each the mean over the samples.

    Raises:
        UsageError: the loss sums, or the optimizer updates parameters that are not the model's.
    """

    framework = "torch"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Figure,
        metrics: Mapping[str, Figure] | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.figures = {"loss": loss, **(metrics or {})}
        self.device = torch.device("cpu")
        self.owns_state = True
        refuse_sum(loss)
        own = {id(parameter) for parameter in model.parameters()}
        foreign = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
        if foreign:
            raise UsageError(
                f"the optimizer updates {foreign} parameters that are not the model's: they would be neither averaged nor saved",
                "make them part of the model, for example in a torch.nn.ModuleDict or a module that holds both",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UsageError(
                f"{type(optimizer).__name__} evaluates the loss several times in a step (it needs a closure), which is not supported",
                "use an optimizer that updates from the gradient alone",
            )
        base = optimizer.param_groups[0]["lr"]
        #: each group's learning rate relative to the first's, which a recipe's ``lr`` replaces
        self._ratios = [float(group["lr"] / base) if base else 1.0 for group in optimizer.param_groups]
        self._reducer: GradientReducer | None = None
        self._readable = False

    def setup(self, comm: Communicator) -> None:
        self._comm = comm
        self.owns_state = comm.world.is_primary
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
            for module in (self.model, *self.figures.values()):  # a loss may hold tensors too: class weights
                if isinstance(module, torch.nn.Module):
                    module.to(self.device)
        if comm.world.size > 1:
            self._reducer = GradientReducer(self.model)

    def sync(self, root: int = 0) -> None:
        if self._reducer is None:
            return
        hvd = self._reducer.hvd
        mine = self._comm.world.rank == root
        tensors: list[torch.Tensor] = []
        state = self._state() if mine else None
        shapes = self._comm.broadcast(_map_tensors(state, _Shape.of, torch.Tensor), name="state/shapes", root=root)
        if state is None:
            state = _map_tensors(shapes, lambda shape: shape.empty(self.device), _Shape)
        # Horovod sends memory as it lies, and refuses any other layout than this one.
        _map_tensors(state, lambda tensor: tensors.append(tensor.contiguous()), torch.Tensor)
        handles = [
            hvd.broadcast_async_(tensor, root_rank=root, name=f"state/{number}") for number, tensor in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        if not mine:
            self._set_state(state)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        self.model.train()
        if self._reducer is not None:
            self._reducer.begin()
        self.optimizer.zero_grad(set_to_none=True)
        inputs, target, count = self._to_device(batch)
        output = None
        if count:
            output = self._forward(inputs)
            loss = _scalar("loss", self.loss(output, target))
            if not loss.requires_grad:
                raise UsageError("the loss depends on no trainable parameter", "set requires_grad = True, and do not detach")
            (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        if self._reducer is not None:
            self._reducer.finish()
        self.optimizer.step()
        with torch.no_grad():
            known = {"loss": loss.detach()} if count else {}
            return self._means(output, target, count, known)

    def settle(self) -> None:
        pass

    def eval_end(self) -> Mapping[str, float]:
        return {}

    @torch.no_grad()
    def eval_step(self, batch: Any) -> Means:
        self.model.eval()
        inputs, target, count = self._to_device(batch)
        return self._means(self._forward(inputs) if count else None, target, count, {})

    def save(self, directory: Path) -> None:
        path = directory / "torch.pt"
        torch.save(self._state(), path)
        if not self._readable:  # a checkpoint that the safe loader refuses is none: find out at the first one
            _read(path, "meta")
            self._readable = True

    def load(self, directory: Path) -> None:
        self._set_state(_read(directory / "torch.pt", "cpu"))

    def _state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        plain: dict[str, Any] = _map_tensors(state, lambda number: number.item(), np.generic)  # the safe loader refuses NumPy's
        return plain

    def _set_state(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _forward(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.model(**inputs)
        if isinstance(inputs, tuple):
            return self.model(*inputs)
        return self.model(inputs)

    def _to_device(self, batch: Any) -> tuple[Any, Any, int]:
        """Inputs, target and number of samples of a batch, as tensors that share memory with its arrays where they can."""
        inputs, target, count = batch_pair(batch)
        return self._tensors(inputs), self._tensors(target), count

    def _tensors(self, arrays: Any) -> Any:
        if isinstance(arrays, dict):
            return {name: self._tensors(array) for name, array in arrays.items()}
        if isinstance(arrays, tuple):
            return tuple(self._tensors(array) for array in arrays)
        return torch.as_tensor(arrays, device=self.device)

    def _means(self, output: Any, target: Any, count: int, known: Mapping[str, torch.Tensor]) -> Means:
        if not count:
            return dict.fromkeys(self.figures, Mean())
        return {
            name: Mean.of(known[name] if name in known else _scalar(name, figure(output, target)), count)
            for name, figure in self.figures.items()
        }


@dataclass(frozen=True)
class _Shape:
    """What a rank must know to make room for another rank's tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    #: counters of an optimizer stay in host memory
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device="cpu" if self.on_host else device)


def _read(path: Path, device: str) -> Any:
    """Load with PyTorch's safe loader, which takes tensors and plain values, and NumPy arrays besides."""
    with torch.serialization.safe_globals(_NUMPY):
        try:
            return torch.load(path, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"the model's or the optimizer's state holds more than tensors, numbers, text and arrays: {error.args[0].splitlines()[0]}",
                "keep only such values in buffers, param_groups and get_extra_state()",
            ) from None


_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.zeros(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"},
]


def _scalar(name: str, value: Any) -> torch.Tensor:
    """A figure's value as a 0-d tensor, in float32 at least, since it is added up over many steps."""
    figure = torch.as_tensor(value)
    if figure.dim() != 0:
        shape = tuple(figure.shape)
        raise UsageError(f"the {name} must be a scalar, got shape {shape}", "return the mean over the samples: .mean()")
    return figure if figure.dtype == torch.float64 else figure.float()


def _map_tensors(tree: Any, function: Callable[[Any], Any], leaf: type) -> Any:
    """Apply ``function`` to the leaves of type ``leaf`` of nested dicts, lists and tuples, in order."""
    if isinstance(tree, leaf):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _map_tensors(value, function, leaf) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, function, leaf) for value in tree)
    return tree
