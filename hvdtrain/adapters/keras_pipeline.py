"""A Keras model whose layers are on several ranks: each makes values for its own only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.adapters import keras_files, keras_metrics, keras_norm, keras_state, refuse_sum
from hvdtrain.adapters.keras import set_lr, set_precision
from hvdtrain.adapters.keras_layers import Chunk, Graph, next_number, seeds
from hvdtrain.adapters.keras_parts import Parts, from_message, plain, states, to_message, write_part
from hvdtrain.adapters.keras_passes import Figure, Form, Given, Head, Passes, Run
from hvdtrain.adapters.keras_reducer import Reducer
from hvdtrain.adapters.keras_traced import Direct
from hvdtrain.comm import Communicator, Message
from hvdtrain.compression import Link
from hvdtrain.compression.choose import parse
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.exchange import Exchange, choose
from hvdtrain.metrics import Mean, Means, merge
from hvdtrain.pipeline.adapter import PipelineAdapter
from hvdtrain.pipeline.part import Cost, Group, Micro, Mode, Place
from hvdtrain.progress import HERE
from hvdtrain.update import Update


class KerasPipeline(PipelineAdapter):
    """A model whose layers can be on several ranks: ``hvdtrain run --pipeline 2``. Without that, each rank has all of it.

    Args:
        make: a function that makes a ``keras.Sequential`` which begins with an ``Input``, or a functional ``keras.Model``. Only
            the rank that has a layer takes memory for its variables. A model that is made already can be given too: then each
            rank has memory for all of it. A layer that is called twice has the same weights at both places, which may be on
            two ranks. A model within the model counts as one layer.
        optimizer: a Keras optimizer, its name, or a function that makes one.
        loss: a Keras loss (an object, a function of (targets, outputs), or a name): a value a sample, or their mean.
        metrics: by name, functions of (targets, outputs), or ``keras.metrics.Metric`` objects, which are evaluated on the
            validation data only.
        update: how a batch becomes one update. ``precision`` sets the dtype policy of the model's float32 layers.

    Raises:
        UsageError: the model has no graph of layers, the loss sums, or the update is one that stages cannot do.
    """

    def __init__(
        self,
        make: Callable[[], Any] | Any,
        optimizer: Any,
        *,
        loss: str | Figure,
        metrics: Mapping[str, Any] | None = None,
        update: Update = Update(),  # noqa: B008 - a frozen value
    ) -> None:
        super().__init__(KerasPart(make, optimizer, loss, metrics, update))


class KerasPart:
    """What one rank has of a model."""

    framework = "tensorflow"

    def __init__(
        self, make: Any, optimizer: Any, loss: str | Figure, metrics: Mapping[str, Any] | None, update: Update
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"KerasPipeline needs Keras on TensorFlow, the backend is {keras.backend.backend()!r}",
                "set KERAS_BACKEND=tensorflow, or use TorchPipeline for a torch model",
            )
        keras_metrics.check(metrics)
        self._first_number = next_number()
        self._graph = Graph(make)
        set_precision(list(self._graph.model._flatten_layers()), update.precision)
        if synced := [layer.name for layer in keras_norm.layers(self._graph.model) if layer.synchronized]:
            raise UsageError(
                f"the layer {synced[0]!r} is synchronized, and micro-batches go through a stage one after the other",
                "leave synchronized out",
            )
        self._make_optimizer, self.update = optimizer, update
        found: Figure = keras.losses.get(loss)
        refuse_sum(found)
        given = dict(metrics or {})
        self._objects = {name: metric for name, metric in given.items() if isinstance(metric, keras.metrics.Metric)}
        figures = {"loss": found, **{name: given[name] for name in given if name not in self._objects}}
        self.figures = tuple(figures)
        self._head = Head(figures, keeps=bool(self._objects))
        self._samples = 0.0
        self._group: Group | None = None
        self._added: dict[tuple[str, ...], Direct] = {}

    def seed(self) -> int:
        return self._first_number

    def costs(self, sample: Any, *, measured: bool) -> list[Cost]:
        graph, uses = self._graph, self._graph.last_uses()
        known: dict[int, Any] = {}
        if measured:
            inputs = graph.flat(_tensors(sample[0]))
            known = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
        found = []
        for number, name in enumerate(graph.names):
            size = sum(_bytes(variable) for variable in graph.first[number])
            seconds, activations = 0.0, 0
            if measured:
                with graph.held(number):
                    outputs, seconds = self._measure(graph.alone(number), known)
                activations = sum(int(output.shape.num_elements()) * output.dtype.size for output in outputs)
                known |= {id(tensor): value for tensor, value in zip(graph.nodes[number].outputs, outputs, strict=True)}
                known = {key: value for key, value in known.items() if uses.get(key, -1) > number}
            found.append(Cost(name, size, seconds, activations))
        return found

    def _measure(self, chunk: Chunk, known: Mapping[int, Any]) -> tuple[list[Any], float]:
        """What a layer returns, and seconds of its forward and backward pass, the fastest of three."""
        begin = seeds((0,), chunk.streams)
        values = [known[id(tensor)] for tensor in chunk.takes]
        variables = [variable.value for variable in chunk.variables if id(variable) in self._graph.trainable]

        def passes(*values: Any) -> Any:
            inputs = [value for value in values if value.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs, _ = chunk.run(values, begin, training=True)
            targets = [output for output in outputs if output.dtype.is_floating]
            gradients = tape.gradient(targets, [*inputs, *variables]) if targets else []
            return outputs, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

        traced = tf.function(passes, autograph=False)
        seconds = []
        for _ in range(4):  # the first one traces
            begun = time.perf_counter()
            outputs, gradients = traced(*values)
            for each in (*outputs, *gradients):
                each.numpy()  # a GPU is done then
            seconds.append(time.perf_counter() - begun)
        return list(outputs), min(seconds[1:])

    def build(self, place: Place) -> None:
        graph, self._place = self._graph, place
        own = [number for first, end in place.chunks for number in range(first, end)]
        graph.fill(own, place.seed)
        chunks = [graph.cut(first, end) for first, end in place.chunks]
        variables = {id(variable) for chunk in chunks for variable in chunk.variables}
        #: this rank's by their names in the whole model, in its order
        self._variables = {name: variable for name, variable in graph.variables.items() if id(variable) in variables}
        self._trained = {name: variable for name, variable in self._variables.items() if id(variable) in graph.trainable}
        if not self._trained:
            raise UsageError(
                f"the layers {', '.join(graph.names[number] for number in own)} would be all of a stage, and have no variable to train",
                "use fewer stages, or give the number of layers of each: --split 3,5,4",
            )
        ends = [place.is_last and chunk is chunks[-1] for chunk in chunks]
        pairs = zip(chunks, ends, strict=True)
        self._passes = [Passes(graph, chunk, self._trained, self._head if is_end else None) for chunk, is_end in pairs]
        self._layers = graph.layers(own)
        self.optimizer = _made(self._make_optimizer)
        self.optimizer.build(list(self._trained.values()))
        self._states = states(self.optimizer, list(self._trained.items()))
        #: as the recipe made it
        self._built_lr = keras_files.learning_rate(self.optimizer)

    def connect(self, group: Group, exchange: Exchange) -> str:
        self._group = group
        if parse(exchange.compression, warmup=exchange.warmup) is not None:
            raise UsageError(
                f"--compression {exchange.compression} is not possible: stages of a Keras model send whole gradients",
                "leave --compression out",
            ).everywhere()
        world = group.peers.world
        #: what a step without a seed draws one from
        self._draw = np.random.default_rng([self._place.seed, world.rank])
        self._tied = self._meet_tied(group.line)
        for metric in self._objects.values():
            metric.reset_state()
        #: names of the variables that get a gradient on some rank; None until the ranks have agreed
        self._used: list[str] | None = None
        self._reducer: Reducer | None = None
        if world.size == 1:
            return ""
        self._reducer = Reducer(Update(), bucket_mb=exchange.bucket_mb, sets=group.sets)
        self._reducer.connect(world.rank, world.size)
        choice = choose(exchange, ["each stage of a pipeline has a process set of Horovod's"], world)
        return f"horovod ({choice.reason})"

    def _meet_tied(self, line: Communicator) -> dict[str, tuple[Communicator, Link]]:
        """Collective. This rank's variables that others of the pipeline have too, and how it meets those."""
        everyone = line.allgather(list(self._variables), name="pipeline/variables")
        found = {}
        for name in sorted({name for theirs in everyone for name in theirs if sum(name in others for others in everyone) > 1}):
            part = line.split(int(name in self._variables), line.world.rank)
            if name in self._variables:
                found[name] = part, part.link()
        return found

    def begin(self, micros: Sequence[Micro], mode: Mode, *, lr: float | None = None, seed: int | None = None) -> None:
        self._micros, self._mode = micros, mode
        self._stored: dict[tuple[int, int], Given | Run] = {}
        #: means of the head, with what the loss and the other figures are means over
        self._facts: list[tuple[Any, float, int]] = []
        self._units, self._step_seed = 0.0, 0
        #: of this rank's variables, by name
        self._gradients: dict[str, Any] = {}
        if mode.training:
            if lr is not None:
                set_lr(self.optimizer, lr)
            self._step_seed = int(self._draw.integers(1 << 63)) if seed is None else seed
            self._samples += sum(micro.count for micro in micros)

    def forward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        passes, of = self._passes[chunk], self._micros[micro]
        targets, counted = (), float(of.count)
        if passes.head is not None:
            targets = _tensors(of.targets)
            counted = float(of.count if self.update.count is None else self.update.count(targets))
        part = of.part * counted / of.count
        inputs, form = (_tensors(of.inputs), None) if received is None else _crossed(received)
        streams = passes.chunk.streams if self._mode.training else ()
        given = Given(inputs, form, targets, part, seeds((self._step_seed, micro), streams))
        if not self._mode.training:
            return self._evaluated(passes, given, counted, of.count)
        if self._mode.recompute:
            self._stored[chunk, micro] = given
            outputs, form = passes.learned(given)
        else:
            run, form = passes.recorded(given)
            self._stored[chunk, micro], outputs = run, run.outputs
        if form is not None:
            return to_message(outputs, [form.masks, form.penalized])
        self._facts.append((outputs[1], counted, of.count))
        self._units += part / self.update.prescale
        return None

    def _evaluated(self, passes: Passes, given: Given, counted: float, count: int) -> Message | None:
        if passes.head is None:
            outputs, form = passes.evaluated(given)
            return to_message(outputs, [form.masks, form.penalized])
        outputs, means = passes.evaluated(given)
        for metric in self._objects.values():
            metric.update_state(given.targets, outputs)
        self._facts.append((means, counted, count))
        return None

    def backward(self, chunk: int, micro: int, received: Message | None) -> Message | None:
        passes, stored = self._passes[chunk], self._stored.pop((chunk, micro))
        run = passes.again(stored) if isinstance(stored, Given) else stored
        gradients = [tf.ones_like(run.outputs[0]), None] if received is None else from_message(received)[0]
        back, own = passes.backward(run, gradients)
        if again := [name for name in own if name in self._gradients]:
            sums = self._adds(again, own)([*(self._gradients[name] for name in again), *(own[name] for name in again)])
            own |= dict(zip(again, sums, strict=True))
        self._gradients |= own
        return None if run.given.form is None else to_message(back)

    def _adds(self, names: Sequence[str], like: Mapping[str, Any]) -> Direct:
        """Adds two lists of gradients, in one call."""
        key = tuple(names)
        if key not in self._added:
            signature = [tf.TensorSpec(like[name].shape, like[name].dtype) for name in names]

            def add(*tensors: Any) -> Any:
                return [one + other for one, other in zip(tensors[: len(key)], tensors[len(key) :], strict=True)]

            self._added[key] = Direct(add, signature * 2)
        return self._added[key]

    def means(self) -> Means:
        found: Means = dict.fromkeys(self.figures, Mean())
        for means, counted, count in self._facts:
            counts = [counted] + [count] * (len(self.figures) - 1)
            values = zip(self.figures, means.numpy().tolist(), counts, strict=True)
            found = merge(found, {name: Mean.of(mean, number) for name, mean, number in values})
        return found

    def reduce(self) -> tuple[float, float]:
        assert self._group is not None
        if self._used is None:
            self._agree()
        assert self._used is not None
        late = self._gradients.keys() - set(self._used)
        if late:
            raise HvdtrainError(
                f"{min(late)} gets a gradient from a batch of another shape, and got none before",
                "a model must use the same variables in every step",
            )
        gradients = [self._gradient(name) for name in self._used]
        units = self._units
        if self._add is not None:
            with HERE.waits("allreduce of the gradients"):
                gradients = self._add(gradients)
        if self.update.count is not None:
            (units,) = self._group.peers.allreduce([units], name="pipeline/units").tolist()
        self._reduced = dict(zip(self._used, gradients, strict=True))
        for name in self._used:
            if name in self._tied:
                self._sum_tied(name)
        return 0.0 if self._squares is None else float(self._squares(list(self._reduced.values()))[0]), units

    def _gradient(self, name: str) -> Any:
        """This rank's; zeros if only others have one."""
        found = self._gradients.get(name)
        return tf.zeros_like(self._trained[name].value) if found is None else found

    def _agree(self) -> None:
        """Collective. A gradient that no rank has is not applied; trace what is done with the others."""
        assert self._group is not None
        found = {name for theirs in self._group.peers.allgather(list(self._gradients), name="pipeline/used") for name in theirs}
        tied = {name for name, (part, _) in self._tied.items() if any(part.allgather(name in found, name="pipeline/used tied"))}
        used = self._used = [name for name in self._trained if name in found | tied]
        variables = [self._trained[name] for name in used]
        signature = [tf.TensorSpec(variable.shape, variable.value.dtype) for variable in variables]
        counted = [place for place, name in enumerate(used) if name not in self._tied or self._tied[name][0].world.is_primary]
        reducer, most = self._reducer, self.update.clip_value

        def add(*gradients: Any) -> Any:
            assert reducer is not None
            return reducer(gradients, None, 1.0)[0]

        def squares(*gradients: Any) -> Any:
            return tf.add_n([tf.reduce_sum(tf.square(tf.cast(gradients[place], tf.float64))) for place in counted])

        def apply(*tensors: Any) -> None:
            *gradients, factor = tensors
            scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
            self.optimizer.apply(
                scaled if most is None else [tf.clip_by_value(each, -most, most) for each in scaled], variables
            )

        self._add = None if reducer is None or not used else Direct(add, signature)
        self._squares = Direct(squares, signature) if counted else None
        self._apply = Direct(apply, [*signature, tf.TensorSpec((), tf.float32)]) if used else None

    def _sum_tied(self, name: str) -> None:
        """Collective over the stages that have a tied variable."""
        gradient = self._reduced[name]
        flat = gradient.numpy().astype(np.float32).reshape(-1)
        self._tied[name][1].sum(flat)
        self._reduced[name] = tf.cast(flat.reshape(gradient.shape), gradient.dtype)

    def not_finite(self) -> list[str]:
        return [name for name, gradient in self._gradients.items() if not bool(tf.reduce_all(tf.math.is_finite(gradient)))]

    def apply(self, factor: float) -> None:
        if self._apply is not None:
            self._apply([*self._reduced.values(), tf.constant(factor, tf.float32)])

    def settle(self) -> None:
        assert self._group is not None
        keras_state.settle(self._layers, self._group.peers, self._samples)
        self._samples = 0.0
        self._share_tied([name for name in self._tied if name not in self._trained])

    def metric_values(self) -> Mapping[str, float]:
        assert self._group is not None
        values: dict[str, float] = {}
        for name, metric in self._objects.items():
            values |= keras_metrics.reduced_result(name, metric, self._group.peers)
            metric.reset_state()
        return values

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, variable in self._named():
            yield name, plain(variable.value.numpy())

    def _named(self) -> Iterator[tuple[str, Any]]:
        for kind, variables in (("model", self._variables), ("optimizer", self._states)):
            for name, variable in variables.items():
                yield f"{kind}/{name}", variable

    def share(self) -> None:
        assert self._group is not None
        self._share_tied(self._tied)
        peers = self._group.peers
        if peers.world.size > 1:
            for name, variable in self._named():
                variable.assign(peers.broadcast(variable.value.numpy() if peers.world.is_primary else None, name=name))

    def _share_tied(self, names: Iterable[str]) -> None:
        """Collective over the stages that have them. As the first one has them."""
        for name in names:
            variable = self._variables[name]
            variable.assign(self._tied[name][0].broadcast(variable.value.numpy(), name=f"tied/{name}"))

    def snapshot(self) -> Callable[[Path, int, int], None]:
        model, optimizer = (
            {name: np.array(plain(variable.value.numpy())) for name, variable in variables.items()}
            for variables in (self._variables, self._states)
        )
        kind = type(self.optimizer).__name__
        return lambda directory, number, count: write_part(directory, number, count, model, optimizer, kind, self._built_lr)

    def check(self, directory: Path, names: Mapping[str, str]) -> None:
        Parts(directory).check(names, type(self.optimizer).__name__)

    def load(self, directory: Path) -> None:
        parts = Parts(directory)
        optimizer, then = parts.optimizer(list(self._states))
        for variables, arrays in ((self._variables, parts.model(list(self._variables))), (self._states, optimizer)):
            for name, variable in variables.items():
                own, array = variable.value.numpy().dtype, arrays[name]
                variable.assign(array if array.dtype == own else array.view(own))
        keras_files.prefer_recipe(self.optimizer, then, self._built_lr)


def _tensors(arrays: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, arrays)


def _crossed(message: Message) -> tuple[list[Any], Form]:
    tensors, (masks, penalized) = from_message(message)
    return tensors, Form(tuple(masks), penalized)


def _made(optimizer: Any) -> Any:
    """The optimizer that the recipe names, gives or makes."""
    is_function = callable(optimizer) and not isinstance(optimizer, keras.optimizers.Optimizer)
    made = keras.optimizers.get(optimizer() if is_function else optimizer)
    problems = {
        "a LossScaleOptimizer": isinstance(made, keras.optimizers.LossScaleOptimizer),
        "loss_scale_factor": bool(made.loss_scale_factor),
        "global_clipnorm": bool(made.global_clipnorm),
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise UsageError(
            f"stages cannot have {' and '.join(found)}: none of them has all gradients",
            "use precision='bfloat16', which needs no scale, and Update(clip_norm=...)",
        )
    return made


def _bytes(variable: Any) -> int:
    return int(math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size))
