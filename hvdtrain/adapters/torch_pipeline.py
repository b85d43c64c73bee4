"""A PyTorch model as a list of layers, each of which is made only on the rank that has it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from numpy.typing import NDArray

from hvdtrain.adapters import refuse_sum, torch_choice, torch_fused
from hvdtrain.adapters import torch_files as files
from hvdtrain.adapters import torch_metrics as stateful
from hvdtrain.adapters import torch_norm as norms
from hvdtrain.adapters import torch_state as states
from hvdtrain.adapters.torch import Figure, check_optimizer, figure_means, pick_device, scalar, to_tensors
from hvdtrain.adapters.torch_exchange import GradientExchange, own_gradients, values_of
from hvdtrain.adapters.torch_layers import Layer, Listed, listed
from hvdtrain.adapters.torch_parts import from_message, read_parts, to_message, write_part
from hvdtrain.comm import Message
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Mean, Means, merge
from hvdtrain.pipeline.adapter import PipelineAdapter
from hvdtrain.pipeline.part import Cost, Group, Micro, Mode, Place
from hvdtrain.update import Update

Optimizer = torch.optim.Optimizer


class TorchPipeline(PipelineAdapter):
    """A model whose layers can be on several ranks: ``hvdtrain run --pipeline 2``. Without that, each rank has all of it.

    Args:
        layers: an ``nn.Sequential``, or a list of modules, of functions that make one, and of ``Layer``s. Those that are made by
            a function exist only on the rank that has them. Each gets what the one before it returns; the first the inputs of a
            batch: one tensor, or the members of a tuple or a dict of them.
        optimizer: makes the optimizer of the module that it is given, which holds a rank's layers:
            ``lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)``.
        loss: ``loss(output, target)``, a scalar that is the mean over the samples (or over what ``update.count`` counts).
        metrics: more figures by name: functions of (output, target) like the loss, or ``torchmetrics.Metric`` objects,
            which are evaluated on the validation data.
        update: clipping and the like.

    Raises:
        UsageError: the loss sums, or the update is one that stages cannot do.
    """

    def __init__(
        self,
        layers: torch.nn.Sequential | Sequence[torch.nn.Module | Layer | Callable[[], torch.nn.Module]],
        optimizer: Callable[[torch.nn.Module], Optimizer],
        *,
        loss: Figure,
        metrics: Mapping[str, Any] | None = None,
        update: Update | None = None,
    ) -> None:
        super().__init__(TorchPart(listed(layers), optimizer, loss, metrics or {}, update or Update()))


class TorchPart:
    """What one rank has of a model."""

    framework = "torch"

    def __init__(
        self,
        layers: list[Listed],
        make_optimizer: Callable[[torch.nn.Module], Optimizer],
        loss: Figure,
        metrics: Mapping[str, Any],
        update: Update,
    ) -> None:
        refuse_sum(loss)
        self._layers, self._make_optimizer, self.update = layers, make_optimizer, update
        self._objects = {name: metric for name, metric in metrics.items() if stateful.is_stateful(metric)}
        #: beside the loss
        self._others: dict[str, Figure] = {name: metric for name, metric in metrics.items() if name not in self._objects}
        self._figures: dict[str, Figure] = {"loss": loss, **self._others}
        self.figures = tuple(self._figures)
        self.device = torch.device("cpu")
        #: this rank's layers, under the names that they have in the whole model
        self.model: torch.nn.ModuleDict = torch.nn.ModuleDict()
        self._chunks: list[list[Listed]] = []
        self._exchange: GradientExchange | None = None
        self._stored: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._micros: Sequence[Micro] = ()
        self._mode = Mode(training=False)
        self._means: Means = {}
        self._units = self._samples = 0.0

    def seed(self) -> int:
        return torch.initial_seed() & (2**63 - 1)

    def costs(self, sample: Any, *, measured: bool) -> list[Cost]:
        known: set[str] = set()
        found: list[Cost] = []
        value = None
        for number, layer in enumerate(self._layers):
            module = layer.made(self.device if measured else torch.device("meta"))
            first = layer.key not in known
            known.add(layer.key)
            size = sum(each.numel() * each.element_size() for each in module.parameters()) if first else 0
            seconds, activations = 0.0, 0
            if measured:
                module.to(self.device)
                value, seconds, activations = self._measure(layer, module, sample if number == 0 else value, number == 0)
            found.append(Cost(layer.name, size, seconds, activations))
        return found

    def _measure(self, layer: Listed, module: torch.nn.Module, value: Any, is_first: bool) -> tuple[Any, float, int]:
        """What the layer returns; seconds of its forward and backward pass, the faster of two; bytes that it keeps in between."""
        if is_first:
            value = to_tensors(value[0], self.device)
        seconds = []
        for _ in range(2):
            inputs = _leaves(value, training=True)
            kept = 0

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal kept
                kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
                return tensor

            begun = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = layer.call(module, inputs, is_first)
            outputs = [each for each in _flat(output) if each.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            seconds.append(time.perf_counter() - begun)
        return states.map_leaves(output, lambda tensor: tensor.detach(), torch.Tensor), min(seconds), kept

    def build(self, place: Place) -> None:
        self._place = place
        self._chunks = [self._layers[first:end] for first, end in place.chunks]
        own = {id(layer) for chunk in self._chunks for layer in chunk}
        first_places = {layer.key: number for number, layer in reversed(list(enumerate(self._layers)))}
        with torch.random.fork_rng(devices=[]):
            for layer in (layer for chunk in self._chunks for layer in chunk):
                if layer.key not in self.model:
                    torch.manual_seed((place.seed + 0x9E3779B97F4A7C15 * (1 + first_places[layer.key])) % 2**63)
                    self.model[layer.key] = layer.made(self.device)
        alias = _aliases(self._layers)
        #: this rank's parameters; one that is in several layers has the name that it has in the first
        self._named = {alias.get(name, name): parameter for name, parameter in self.model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        for layer in self._layers:
            if id(layer) not in own:
                layer.forget()
        parameters = sum(parameter.requires_grad for parameter in self.model.parameters())
        if not parameters:
            names = ", ".join(layer.name for chunk in self._chunks for layer in chunk)
            raise UsageError(
                f"the layers {names} would be all of a stage, and have no parameter to train",
                "use fewer stages, or give the number of layers of each: --split 3,5,4",
            )
        self.optimizer = self._make_optimizer(self.model)
        check_optimizer(self.model, self.optimizer)
        self._built = files.settings(self.optimizer)
        base = self.optimizer.param_groups[0]["lr"]
        self._ratios = [float(group["lr"] / base) if base else 1.0 for group in self.optimizer.param_groups]

    def connect(self, group: Group, exchange: Exchange) -> str:
        self._group = group
        self.device = pick_device(group.peers.world)
        self.model.to(self.device)
        for each in (*self._figures.values(), *self._objects.values()):
            if isinstance(each, torch.nn.Module):
                each.to(self.device)
        torch_fused.prefer(self.optimizer)
        if self._exchange is not None:
            self._exchange.close()
        self._exchange, told = torch_choice.of_stage(self.model, self.optimizer, self.update, group, exchange)
        everyone = group.line.allgather(list(self._named), name="pipeline/parameters")
        several = sorted({name for theirs in everyone for name in theirs if sum(name in others for others in everyone) > 1})
        #: tied parameters that this rank has -> the ranks of the pipeline that have it too
        self._tied: dict[str, Any] = {}
        for name in several:
            part = group.line.split(int(name in self._named), group.line.world.rank)
            if name in self._named:
                self._tied[name] = part, part.link()
        return told

    def begin(self, micros: Sequence[Micro], mode: Mode, *, lr: float | None = None, seed: int | None = None) -> None:
        self._micros, self._mode = micros, mode
        self._means, self._units, self._stored = dict.fromkeys(self._figures, Mean()), 0.0, {}
        self.model.train(mode.training)
        if not mode.training:
            return
        assert self._exchange is not None
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = None
        if not mode.reducing:
            self._exchange.pause()
            return
        self._samples += sum(micro.count for micro in micros)
        # A parameter that several chunks have gets more gradients than there are micro-batches: then all are summed at the end.
        self._exchange.begin(max(len(micros), 1) if len(self._chunks) == 1 else 1 << 62)

    def forward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        begins = self._place.is_first and chunk == 0
        if begins:
            value = to_tensors(self._micros[micro].inputs, self.device)
        else:
            assert received is not None
            value = from_message(received, self.device)
        inputs = value if begins else _leaves(value, training=self._mode.training)
        with self._precision(), torch.set_grad_enabled(self._mode.training):
            if self._mode.training and self._mode.recompute:
                output = torch.utils.checkpoint.checkpoint(self._through, chunk, inputs, begins, use_reentrant=False)
            else:
                output = self._through(chunk, inputs, begins)
            if self._place.is_last and chunk == len(self._chunks) - 1:
                output = self._finish(output, self._micros[micro])
        if self._mode.training:
            self._stored[chunk, micro] = None if begins else inputs, output
        return None if self._place.is_last and chunk == len(self._chunks) - 1 else to_message(output)

    def _through(self, chunk: int, value: Any, begins: bool) -> Any:
        first = self.model[self._chunks[chunk][0].key]
        if not begins and any(getattr(module, "inplace", False) for module in first.modules()):  # which leaves do not allow
            value = states.map_leaves(value, torch.clone, torch.Tensor)
        for number, layer in enumerate(self._chunks[chunk]):
            value = layer.call(self.model[layer.key], value, begins and number == 0)
        return value

    def _finish(self, output: Any, micro: Micro) -> Any:
        """The loss, times what it counts for; and the figures."""
        target = to_tensors(micro.targets, self.device)
        units = float(self.update.count(target)) if self.update.count is not None else float(micro.count)
        if not self._mode.training:
            self._means = merge(self._means, figure_means(self._figures, output, target, units))
            for metric in self._objects.values():
                metric.update(output, target)
            return None
        if not units:  # a mean over nothing is no number
            return sum((each.float().sum() * 0.0 for each in _flat(output)), torch.zeros((), device=self.device))
        loss = scalar("loss", self._figures["loss"](output, target))
        if not loss.requires_grad:
            raise UsageError("the loss depends on no trainable parameter", "set requires_grad = True, and do not detach")
        part = micro.part * units / micro.count
        self._units += part / self.update.prescale
        found = {"loss": Mean.of(loss.detach().item() if loss.is_cpu else loss.detach(), units)}
        if self._others:
            with torch.no_grad():
                found |= figure_means(self._others, output, target, units)
        self._means = merge(self._means, found)
        return loss * part

    def backward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        inputs, output = self._stored.pop((chunk, micro))
        if received is None:
            torch.autograd.backward(output)
        else:
            gradients = from_message(received, self.device)
            pairs = [
                (each, gradient)
                for each, gradient in zip(_flat(output), gradients, strict=True)
                if each.requires_grad and gradient is not None
            ]
            if pairs:
                torch.autograd.backward([each for each, _ in pairs], [gradient for _, gradient in pairs])
        return None if inputs is None else to_message([each.grad for each in _flat(inputs)])

    def means(self) -> Means:
        return self._means

    def reduce(self) -> tuple[float, float]:
        assert self._exchange is not None
        (units,) = self._exchange.finish([self._units]).numbers
        for name, (_, link) in self._tied.items():
            self._sum_tied(self._named[name], link)
        own_gradients(self.optimizer)  # makes one of the rows of a sparse gradient that come several times
        squares = 0.0
        for name, parameter in self._named.items():
            if parameter.grad is not None and (name not in self._tied or self._tied[name][0].world.is_primary):
                values = values_of(parameter.grad)
                squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        return squares, units

    def _sum_tied(self, parameter: torch.nn.Parameter, link: Any) -> None:
        """Collective over the stages that have it."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat = gradient.detach().to("cpu", torch.float32, copy=True).contiguous().reshape(-1)
        link.sum(flat.numpy())
        parameter.grad = flat.reshape(parameter.shape).to(parameter.device, parameter.dtype)

    def not_finite(self) -> list[str]:
        assert self._exchange is not None
        return [
            name
            for name, parameter in self._named.items()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]

    def apply(self, factor: float) -> None:
        assert self._exchange is not None
        for gradient in self._exchange.gradients():
            if factor != 1.0:
                gradient.mul_(factor)
            if self.update.clip_value is not None:
                gradient.clamp_(-self.update.clip_value, self.update.clip_value)
        self._exchange.update()

    def settle(self) -> None:
        if self._group.peers.world.size > 1:
            norms.average_statistics(self.model, self._group.peers, self._samples)
            self._samples = 0.0

    def metric_values(self) -> Mapping[str, float]:
        return {name: stateful.value(name, metric, self._group.peers) for name, metric in self._objects.items()}

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from states.named_arrays(self.model, self.optimizer, self._names)

    def share(self) -> None:
        with torch.no_grad():
            for name, (part, _) in self._tied.items():
                parameter = self._named[name]
                parameter.copy_(torch.from_numpy(part.broadcast(parameter.cpu().numpy(), name=f"tied/{name}")))
        peers = self._group.peers
        if peers.world.size > 1:
            mine = peers.world.is_primary
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()} if mine else None

            def send(tensors: Sequence[torch.Tensor], root: int) -> None:
                for number, tensor in enumerate(tensors):
                    array = peers.broadcast(tensor.cpu().numpy() if mine else None, name=f"state/{number}", root=root)
                    tensor.copy_(torch.from_numpy(array))

            state = states.broadcast(state, peers, send, device=self.device)
            if not mine:
                self.model.load_state_dict(state["model"])
                self._load_optimizer(state["optimizer"])

    def _load_optimizer(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)
        states.lay_out(self.optimizer)
        torch_fused.prefer(self.optimizer)

    def snapshot(self) -> Callable[[Path, int, int], None]:
        state = files.plain_copy({"model": self.model.state_dict()})["model"]
        optimizer = files.plain_copy(self.optimizer.state_dict())
        order = [self._names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]
        return lambda directory, number, count: write_part(
            directory, number, count, state, optimizer | {"names": order, "built": self._built}
        )

    def check(self, directory: Path, names: Mapping[str, str]) -> None:
        read_parts(directory).check(names)

    def load(self, directory: Path) -> None:
        parts = read_parts(directory)
        own = self.model.state_dict()
        self.model.load_state_dict(states.with_versions(parts.model(own), states.versions(own)))
        state, then = parts.optimizer(self.optimizer, self._names)
        self._load_optimizer(state)
        files.prefer_recipe(self.optimizer, then, self._built)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.update.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.update.precision))


def _leaves(value: Any, *, training: bool) -> Any:
    """Tensors that get a gradient where they can have one."""
    return states.map_leaves(
        value, lambda tensor: tensor.detach().requires_grad_(training and tensor.is_floating_point()), torch.Tensor
    )


def _flat(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    states.map_leaves(value, found.append, torch.Tensor)
    return found


def _aliases(layers: Sequence[Listed]) -> dict[str, str]:
    """The names of parameters that are those of an earlier layer -> the name there."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for layer in layers:
        for name, parameter in layer.known_parameters():
            if (earlier := first.setdefault(id(parameter), name)) != name:
                found[name] = earlier
    return found
