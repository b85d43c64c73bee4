"""PyTorch: any module, any optimizer; how gradients travel between ranks is an exchange's business."""

from __future__ import annotations

import contextlib
import inspect
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapters import batch_pair, blame, refuse_sum, torch_choice
from hvdtrain.adapters import torch_files as files
from hvdtrain.adapters import torch_fused as fused
from hvdtrain.adapters import torch_metrics as stateful
from hvdtrain.adapters import torch_norm as norms
from hvdtrain.adapters import torch_state as states
from hvdtrain.adapters.torch_compressed import Compressed
from hvdtrain.adapters.torch_exchange import Alone, GradientExchange, Summed, values_of
from hvdtrain.adapters.torch_reducer import start_horovod
from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Mean, Means, merge
from hvdtrain.update import Update
from hvdtrain.world import World

#: a figure of (output, target): a scalar, the mean over the samples of the batch; or a Mean
Figure = Callable[[Any, Any], Any]


class TorchAdapter:
    """One replica of a ``torch.nn.Module``.

    Args:
        model: called with the inputs of a batch: one tensor, or the members of a tuple or a dict of them.
        optimizer: over the model's parameters. It stays as it is; its state goes into checkpoints.
        loss: ``loss(output, target)``, a scalar that is the mean over the samples (or over what ``update.count`` counts).
        metrics: more figures by name: functions of (output, target) like the loss, or ``torchmetrics.Metric`` objects,
            which are evaluated on the validation data.
        update: precision, micro-batches, clipping and the like.

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
        metrics: Mapping[str, Any] | None = None,
        update: Update | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss, self.update = model, optimizer, loss, update or Update()
        metrics = metrics or {}
        self.objects = {name: metric for name, metric in metrics.items() if stateful.is_stateful(metric)}
        #: beside the loss
        self._others: dict[str, Figure] = {name: metric for name, metric in metrics.items() if name not in self.objects}
        self.figures = {"loss": loss, **self._others}
        self.device = torch.device("cpu")
        refuse_sum(loss)
        check_optimizer(model, optimizer)
        base = optimizer.param_groups[0]["lr"]
        #: each group's learning rate relative to the first's, which a recipe's ``lr`` replaces
        self._ratios = [float(group["lr"] / base) if base else 1.0 for group in optimizer.param_groups]
        #: the optimizer's settings as the recipe made them
        self._built = files.settings(optimizer)
        self._copy = files.HostCopy()
        self._exchange: GradientExchange = Alone(optimizer)
        #: what carries compressed gradients; its compressor stays over the rounds of an elastic job
        self._carrier: Compressed | None = None
        self._scaler: torch.amp.GradScaler | None = None
        #: whether the last pass was one of training
        self._is_training = False
        #: of the steps since the moving statistics were last made equal
        self._samples = 0.0

    def setup(self, comm: Communicator, exchange: Exchange = Exchange()) -> str:  # noqa: B008 - a frozen value
        self._comm = comm
        self._peers = self.update.peers(comm.world.rank, comm.world.size)
        self.device = pick_device(comm.world)
        if self.device.type == "cuda":
            for module in (
                self.model,
                *self.figures.values(),
                *self.objects.values(),
            ):  # a loss may hold tensors too: class weights
                if isinstance(module, torch.nn.Module):
                    module.to(self.device)
        for metric in self.objects.values():
            metric.reset()
        if self.update.precision == "float16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.device.type)
            self._scaler.scale(torch.zeros((), device=self.device))  # makes its state, also where the first step has no sample
        fused.prefer(self.optimizer)
        self._exchange.close()
        self._exchange, self._carrier, reason = torch_choice.choose(
            self.model, self.optimizer, self.update, comm, self.device, exchange, self._carrier
        )
        if self.update.sync_batch_norm and comm.world.size > 1:
            norms.synchronize(self.model, start_horovod(self.update)[0])
        return reason

    def sync(self, root: int = 0) -> None:
        if self._comm.world.size > 1:
            mine = self._comm.world.rank == root
            state = self._state() if mine else None
            if state and "exchange" in state and self._carrier is not None:
                state["exchange"] = self._carrier.handed()
            state = states.broadcast(state, self._comm, self._exchange.broadcast, device=self.device, root=root)
            if not mine:
                self._set_state(state)
            self._exchange.adopt()

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from states.named_arrays(self.model, self.optimizer)

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        if not (self._is_training and self.model.training):  # which visits every module
            self.model.train()
            self._is_training = True
        with self._whole() if self._comm.world.elastic else contextlib.nullcontext():
            factor = self.update.factor(weight, self._peers)
            inputs, target, count = self._to_device(batch)
            parts = self._micro_batches(inputs, target, count)
            self._samples += count
            self._exchange.begin(max(len(parts), 1))
            means, units = self._accumulate(parts, factor, seed, self._scaler)
            summed = self._exchange.finish([units])
            if self._finish(summed, lambda: self._blame(parts, factor, seed)):
                self._exchange.update()
            return means

    def settle(self, *, saving: bool = False) -> None:
        if self._comm.world.size > 1:
            self._exchange.settle()
            if saving and self._carrier is not None:
                self._carrier.settle()
            norms.average_statistics(self.model, self._comm, self._samples)
            self._samples = 0.0

    @torch.no_grad()
    def eval_step(self, batch: Any) -> Means:
        self.model.eval()
        self._is_training = False
        inputs, target, count = self._to_device(batch)
        if not count:
            return dict.fromkeys(self.figures, Mean())
        with self._precision():
            output = self._forward(inputs)
            means = figure_means(self.figures, output, target, self._units(target, count))
        for metric in self.objects.values():
            metric.update(output, target)
        return means

    def eval_end(self) -> Mapping[str, float]:
        return {name: stateful.value(name, metric, self._comm) for name, metric in self.objects.items()}

    def snapshot(self) -> Callable[[Path], None]:
        state = self._copy.take(self._state() | {"built": self._built})
        return lambda directory: files.write(directory, state)

    def load(self, directory: Path) -> None:
        state = files.read(directory)
        self._set_state(state)
        files.prefer_recipe(self.optimizer, state["built"], self._built)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """In an elastic job, take back what the forward pass of a step changes, if the loss of a rank interrupts it."""
        buffers = list(self.model.buffers())
        kept, samples = [buffer.clone() for buffer in buffers], self._samples
        try:
            yield
        except Exception:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
            self._samples = samples
            raise

    def _state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if self._comm.world.size > 1 and self._carrier is not None and (remembered := self._carrier.state()):
            state["exchange"] = remembered
        return state

    def _set_state(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        states.lay_out(self.optimizer)
        fused.prefer(self.optimizer)
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
        if self._comm.world.size > 1 and self._carrier is not None:
            self._carrier.load(state.get("exchange", {}))

    def _accumulate(
        self, parts: list[tuple[Any, Any, int]], factor: float, seed: int | None, scaler: Any
    ) -> tuple[Means, float]:
        """Sum the gradients of this rank's micro-batches, each weighted by its part of the global batch.

        Returns:
            means over this rank's samples, and its units as a part of the global batch's samples.
        """
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, which takes 0.3 ms
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
        for group in self.optimizer.param_groups:  # as zero_grad() does, without its records for profilers
            for parameter in group["params"]:
                parameter.grad = None
        means: Means = dict.fromkeys(self.figures, Mean())
        samples, all_units = sum(count for _, _, count in parts), 0.0
        for inputs, target, count in parts:
            units = self._units(target, count)
            if not units:
                self._pass_for_nothing(inputs, count)
                continue
            with self._precision():
                output = self._forward(inputs)
                loss = scalar("loss", self.loss(output, target))
            if not loss.requires_grad:
                raise UsageError("the loss depends on no trainable parameter", "set requires_grad = True, and do not detach")
            part = factor * units / samples
            if scaler is None:
                whole = part == 1.0
                torch.autograd.backward(loss, None if whole else torch.full((), part, dtype=loss.dtype, device=loss.device))
            else:
                scaler.scale(loss * part).backward()
            all_units += part / self.update.prescale
            found = {"loss": _mean("loss", loss.detach(), units)}
            if self._others:
                with torch.no_grad(), self._precision():
                    found |= figure_means(self._others, output, target, units)
            means = merge(means, found) if len(parts) > 1 else found
        return means, all_units

    def _pass_for_nothing(self, inputs: Any, count: int) -> None:
        """Take part in what the ranks do together within a pass: ``count`` samples without a loss, or one that counts for none.

        Without synchronised layers that is nothing.
        """
        if not (self.update.sync_batch_norm and self._comm.world.size > 1):
            return
        if not count:
            inputs = states.map_leaves(inputs, lambda tensor: tensor.new_zeros((1, *tensor.shape[1:])), torch.Tensor)
            norms.set_part(self.model, 1.0, present=False)
        outputs: list[torch.Tensor] = []
        with self._precision():
            states.map_leaves(self._forward(inputs), outputs.append, torch.Tensor)
        sum((output.float().sum() * 0.0 for output in outputs), torch.zeros((), device=self.device)).backward()  # type: ignore[no-untyped-call]
        norms.set_part(self.model, 1.0)

    def _finish(self, summed: Summed, blame_ranks: Callable[[], None]) -> bool:
        """Unscale and clip the reduced gradients; whether they can be applied, which ranks that reduced together find alike."""
        gradients = self._exchange.gradients()
        if not gradients:
            return True
        (units,) = summed.numbers
        # A batch without any unit (only padding) has no gradient at all.
        factor = self.update.postscale * (1.0 if self.update.count is None or not units else 1.0 / units)
        norm, scale = summed.norm, 0.0
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            norm = None
        norm = factor * (_norm(gradients) if norm is None else norm)
        finite = math.isfinite(norm)
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            self._scaler.update()
        if not finite and scale <= 1.0:  # what still overflows unscaled is none of the scaling's doing
            blame_ranks()
        if finite and self.update.clip_norm is not None:
            factor *= min(1.0, self.update.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        if finite and factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        if finite and self.update.clip_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.update.clip_value, self.update.clip_value)
        return finite

    def _blame(self, parts: list[tuple[Any, Any, int]], factor: float, seed: int | None) -> None:
        """Collective. Raise the error that names the rank and the tensor whose own gradient is not finite."""
        self._exchange.pause()
        means, _ = self._accumulate(parts, factor, seed, None)
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not values_of(parameter.grad).isfinite().all()
        ]
        blame(bad, means["loss"].value, socket.gethostname(), self._comm)

    def _units(self, target: Any, count: int) -> float:
        """What the loss of this micro-batch is a mean over."""
        return float(self.update.count(target)) if self.update.count is not None and count else float(count)

    def _micro_batches(self, inputs: Any, target: Any, count: int) -> list[tuple[Any, Any, int]]:
        size = self.update.micro_batch_size
        if size is None or count <= size:
            return [(inputs, target, count)]
        pieces = []
        for start in range(0, count, size):
            piece = slice(start, start + size)
            take = lambda tensor, piece=piece: tensor[piece]  # noqa: E731
            pieces.append(
                (
                    states.map_leaves(inputs, take, torch.Tensor),
                    states.map_leaves(target, take, torch.Tensor),
                    min(size, count - start),
                )
            )
        return pieces

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        precision = self.update.precision
        if precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, precision))

    def _forward(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.model(**inputs)
        if isinstance(inputs, tuple):
            return self.model(*inputs)
        return self.model(inputs)

    def _to_device(self, batch: Any) -> tuple[Any, Any, int]:
        """Inputs, target and number of samples of a batch, as tensors that share memory with its arrays where they can."""
        inputs, target, count = batch_pair(batch)
        return to_tensors(inputs, self.device), to_tensors(target, self.device), count


def to_tensors(arrays: Any, device: torch.device) -> Any:
    """Nested tuples and dicts of arrays as tensors that share memory with them where they can."""
    if isinstance(arrays, np.ndarray) and arrays.flags.writeable and device.type == "cpu":
        return torch.from_numpy(arrays)  # as the last line, in a third of its time
    if isinstance(arrays, dict):
        return {name: to_tensors(array, device) for name, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(to_tensors(array, device) for array in arrays)
    return torch.as_tensor(arrays, device=device)


def pick_device(world: World) -> torch.device:
    """This rank's GPU, or the CPU. Of several that it sees it takes that of its local rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() > 1 and world.size > 1:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if ``optimizer`` has parameters that are not ``model``'s, or evaluates the loss by itself."""
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


def _norm(gradients: list[torch.Tensor]) -> float:
    """Of all elements together; not finite if one of them is not."""
    norms = torch._foreach_norm(gradients)
    if all(norm.device.type == "cpu" for norm in norms):
        return math.hypot(*(norm.item() for norm in norms))
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))


def figure_means(figures: Mapping[str, Figure], output: Any, target: Any, units: float) -> Means:
    return {name: _mean(name, figure(output, target), units) for name, figure in figures.items()}


def _mean(name: str, value: Any, units: float) -> Mean:
    if isinstance(value, Mean):
        return value
    number = scalar(name, value)
    # On a GPU reading it would wait for the step; in host memory it is there, and adds up faster than a tensor.
    return Mean.of(number.item() if number.is_cpu else number, units)


def scalar(name: str, value: Any) -> torch.Tensor:
    """A figure's value as a 0-d tensor, in float32 at least, since it is added up over many steps."""
    figure = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if figure.dim() != 0:
        shape = tuple(figure.shape)
        raise UsageError(f"the {name} must be a scalar, got shape {shape}", "return the mean over the samples: .mean()")
    return figure if figure.dtype == torch.float64 else figure.float()
