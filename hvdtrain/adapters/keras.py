"""Keras 3 on TensorFlow: one traced step, gradients reduced by Horovod before the optimizer's own update.

Horovod's Keras wrapper is not used: under Keras 3 it fails (variables have no ``ref``), and on some paths would not
average at all, because Keras 3 calls ``apply`` and no longer the method that the wrapper overrides.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.adapters import blame, keras_files, keras_metrics, keras_norm, keras_shared, keras_state, refuse_sum
from hvdtrain.adapters.keras_batches import Batches, fresh
from hvdtrain.adapters.keras_compressed import CompressedExchange
from hvdtrain.adapters.keras_compressed import refusal as not_compressed
from hvdtrain.adapters.keras_reducer import Reducer
from hvdtrain.adapters.keras_shared import SharedExchange
from hvdtrain.adapters.keras_traced import Traced
from hvdtrain.comm import Communicator
from hvdtrain.comm.shared import room
from hvdtrain.compression.choose import parse
from hvdtrain.compression.choose import refusal as no_compression
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.exchange import Exchange, choose, refusal
from hvdtrain.metrics import Mean, Means
from hvdtrain.progress import HERE
from hvdtrain.update import Update

#: a figure of (targets, outputs), in Keras' order: a value a sample, or their mean
Figure = Callable[[Any, Any], Any]


@dataclass
class _Plan:
    """What is traced for one choice of trainable variables (layers may be frozen and unfrozen between steps)."""

    variables: list[Any]
    #: numbers of the variables that get a gradient on some rank; None until the ranks have agreed
    used: list[int] | None = None
    #: the step, by whether it sets the random streams, and whether it has samples
    steps: dict[tuple[bool, bool], Traced] = field(default_factory=dict)
    #: what an exchange outside of the traced step calls the used ones
    numbers: tuple[int, ...] = ()


class KerasAdapter:
    """One replica of a ``keras.Model``.

    Args:
        model: a built model (with an ``Input``).
        optimizer: a Keras optimizer or its name. Under float16 it is put into a ``LossScaleOptimizer``.
        loss: a Keras loss (an object, a function of (targets, outputs), or a name): a value a sample, or their mean.
        metrics: by name, functions of (targets, outputs), for example ``keras.metrics.sparse_categorical_accuracy``, or
            ``keras.metrics.Metric`` objects, which are evaluated on the validation data only.
        update: how a batch becomes one update. ``precision`` sets the dtype policy of the model's float32 layers;
            layers that have a mixed policy of their own keep it.
    """

    framework = "tensorflow"

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        loss: str | Figure,
        metrics: Mapping[str, Any] | None = None,
        update: Update = Update(),  # noqa: B008 - a frozen value
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"KerasAdapter needs Keras on TensorFlow, the backend is {keras.backend.backend()!r}",
                "set KERAS_BACKEND=tensorflow, or use TorchAdapter for a torch model",
            )
        if not isinstance(model, keras.Model):
            raise UsageError(f"KerasAdapter needs a keras.Model, got a {type(model).__name__}")
        if not model.built:
            raise UsageError(
                f"the model {model.name!r} is not built yet", "begin it with keras.Input(shape), or call model.build()"
            )
        if not model.trainable_variables:
            raise UsageError(f"the model {model.name!r} has no trainable variable", "set layer.trainable = True on some layer")
        keras_metrics.check(metrics)
        self.model, self.update = model, update
        self._layers = list(model._flatten_layers())
        set_precision(self._layers, update.precision)
        self._variables = list(model.variables)  # the model walks through all its layers for them
        self._unseeded = tf.zeros((0, 2), tf.int64)
        self._last_factor = 1.0, tf.constant(1.0)
        self._generators = keras_state.generators(model)
        self.optimizer = _with_loss_scale(keras.optimizers.get(optimizer), self._layers)
        self.optimizer.build(model.trainable_variables)
        #: as the recipe made it
        self._built_lr = keras_files.learning_rate(self.optimizer)
        self._copy = keras_files.HostCopy()
        self._known = list(model.trainable_variables)
        self._loss: Figure = keras.losses.get(loss)
        refuse_sum(self._loss)
        given = dict(metrics or {})
        self.objects = {name: metric for name, metric in given.items() if isinstance(metric, keras.metrics.Metric)}
        self.figures = {"loss": self._loss, **{name: given[name] for name in given if name not in self.objects}}
        self._synced = [n for n in keras_norm.layers(model) if update.sync_batch_norm or n.synchronized]
        if self._synced and update.micro_batch_size is not None:
            raise UsageError(
                f"the layer {self._synced[0].name!r} is synchronized and micro_batch_size is set: "
                "a micro-batch would be normalised by itself",
                "leave out one of them",
            )
        self._moments: keras_norm.SyncedMoments | None = None
        self._reducer = Reducer(update)
        #: what carries gradients outside of the traced step; None: they are reduced in it
        self._exchange: SharedExchange | CompressedExchange | None = None
        #: where it carries gradients, or the moments of synchronised layers
        self._hvd: Any = None
        #: of the steps since the moving statistics were last made equal
        self._samples = 0.0
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._evaluate = Traced(self._traced_evaluate)
        self._batches = Batches(on_host=not tf.config.list_physical_devices("GPU"))

    def setup(self, comm: Communicator, exchange: Exchange = Exchange()) -> str:  # noqa: B008 - a frozen value
        self._comm = comm
        self.update.check_size(comm.world.size)
        self._peers = self.update.peers(comm.world.rank, comm.world.size)
        self._plans.clear()  # traced steps hold the number of ranks
        if self._moments is not None:
            self._moments.detach()
            self._moments = None
        self._reducer = Reducer(self.update, bucket_mb=exchange.bucket_mb)
        for metric in self.objects.values():
            metric.reset_state()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        self._hvd = None
        if comm.world.size == 1:
            parse(exchange.compression, warmup=exchange.warmup)  # a mistake is one here too
            return ""
        self._exchange, told = self._choose(exchange)
        if self._synced or not isinstance(self._exchange, SharedExchange):
            self._hvd = self._reducer.connect(comm.world.rank, comm.world.size)
        if self._synced:
            place = self._reducer.rank, self._reducer.size
            self._moments = keras_norm.SyncedMoments(self._synced, self._reducer.sum, *place)
        return told

    def _choose(self, exchange: Exchange) -> tuple[SharedExchange | CompressedExchange | None, str]:
        """Collective. What carries the gradients, and why; None: Horovod, within the traced step."""
        world, comm = self._comm.world, self._comm
        layout = keras_shared.layout(self._known, self.optimizer)
        why = refusal(
            world,
            self.update,
            exchange,
            over_mpi=comm.shares_memory,
            on_host=not tf.config.list_physical_devices("GPU"),
            needed=0 if isinstance(layout, str) else layout.bytes_needed(world.local_size),
            room=room(),
        )
        if not why and isinstance(layout, str):
            why = layout
        choice = choose(exchange, comm.allgather(why, name="exchange"), world)
        if choice.engine == "shared" and isinstance(layout, keras_shared.Layout):
            who = f"every rank updates all variables: {layout.whole}" if layout.whole else "each rank updates its share"
            return SharedExchange(layout, self.optimizer, self.update, comm), f"shared memory ({choice.reason}); {who}"
        compressed = self._compressed(exchange)
        packed = f", {exchange.compression}" if compressed else ""
        return compressed, f"horovod{packed} ({choice.reason})"

    def _compressed(self, exchange: Exchange) -> CompressedExchange | None:
        """Collective."""
        compressor, update = parse(exchange.compression, warmup=exchange.warmup), self.update
        if compressor is None:
            return None
        sets = bool(update.process_sets)
        why = no_compression(exchange.compression, op=update.op, precision=update.precision, process_sets=sets, sparse=False)
        if why := why or not_compressed(self._known):
            raise UsageError(
                f"--compression {exchange.compression} is not possible: {why}", "leave --compression out"
            ).everywhere()
        return CompressedExchange(compressor, self._known, self.optimizer, update, self._comm, exchange.bucket_mb)

    def sync(self, root: int = 0) -> None:
        if self._comm.world.size > 1:
            keras_state.broadcast(self.model, self.optimizer, self._comm, self._hvd, root)
            if isinstance(self._exchange, CompressedExchange):
                self._exchange.sync(root)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        return keras_state.arrays(self.model, self.optimizer)

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        if lr is not None:
            set_lr(self.optimizer, lr)
        with self._whole():
            inputs, targets, count = self._batches.tensors(batch)
            self._samples += count
            plan = self._plan()
            factor = self._factor(self.update.factor(weight, self._peers))
            seeds = self._unseeded
            if seed is not None and self._generators:
                seeds = tf.constant(_seeds(seed, len(self._generators)), tf.int64)
            kind = seeds is not self._unseeded, count > 0
            step = self._together if self._exchange is None else self._apart
            norm, counted, totals = step(plan, kind, inputs, targets, factor, seeds)
            if not math.isfinite(norm):
                self._not_finite(plan, kind, inputs, targets, factor, seeds)
            if not count:
                return dict.fromkeys(self.figures, Mean())
            means = {name: Mean(total, count) for name, total in zip(self.figures, totals, strict=True)}
            return means if self.update.count is None else means | {"loss": Mean(totals[0], counted)}

    def settle(self, *, saving: bool = False) -> None:
        if self._exchange is not None:
            self._exchange.settle(saving=saving)
        keras_state.settle(self._layers, self._comm, self._samples)
        self._samples = 0.0

    def eval_step(self, batch: Any) -> Means:
        inputs, targets, count = fresh(batch)
        if not count:
            return dict.fromkeys(self.figures, Mean())
        outputs, totals = self._evaluate(inputs, targets)
        for metric in self.objects.values():
            metric.update_state(targets, outputs)
        return {name: Mean(total, count) for name, total in zip(self.figures, totals, strict=True)}

    def eval_end(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for name, metric in self.objects.items():
            values |= keras_metrics.reduced_result(name, metric, self._comm)
            metric.reset_state()
        return values

    def snapshot(self) -> Callable[[Path], None]:
        remembered = self._exchange.state() if isinstance(self._exchange, CompressedExchange) else {}
        return self._copy.take(self.model, self.optimizer, self._built_lr, remembered)

    def load(self, directory: Path) -> None:
        remembered = keras_files.load(directory, self.model, self.optimizer, self._built_lr)
        if isinstance(self._exchange, CompressedExchange):
            self._exchange.load(remembered)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """In an elastic job, take back what the forward pass of a step changes, if the loss of a rank interrupts it."""
        variables = self.model.non_trainable_variables if self._comm.world.elastic else []
        kept, samples = [tf.identity(variable.value) for variable in variables], self._samples
        try:
            yield
        except Exception:
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(value)
            self._samples = samples
            raise

    def _plan(self) -> _Plan:
        key = tuple([variable.trainable for variable in self._variables])
        if key not in self._plans:
            variables, known = self.model.trainable_variables, {id(variable) for variable in self._known}
            late = next((variable for variable in variables if id(variable) not in known), None)
            if late is not None:
                raise UsageError(
                    f"{late.path} is trained now, and was frozen when the optimizer was made",
                    "make the adapter while all layers that will ever train are trainable, and freeze them afterwards",
                )
            self._plans[key] = _Plan(variables)
        return self._plans[key]

    def _together(self, plan: _Plan, kind: tuple[bool, bool], *tensors: Any) -> tuple[float, float, list[float]]:
        """Collective. The step as one traced function, with its reductions: the norm, what is counted, the figures' sums."""
        if kind not in plan.steps:
            plan.steps[kind] = Traced(lambda *tensors: self._traced_train(plan, kind, *tensors))
        with HERE.waits("allreduce of the gradients, inside the traced step", certain=False):
            (facts,) = plan.steps[kind].flat(*tensors)
            norm, counted, *totals = facts.numpy().tolist()
        return norm, counted, totals

    def _apart(self, plan: _Plan, kind: tuple[bool, bool], *tensors: Any) -> tuple[float, float, list[float]]:
        """Collective. Gradients and update as traced functions of their own, and in between they meet those of the others."""
        assert self._exchange is not None
        if kind not in plan.steps:
            plan.steps[kind] = Traced(lambda *tensors: self._traced_gradients(plan, kind, *tensors))
        facts, *gradients = plan.steps[kind].flat(*tensors)
        counted, *totals = facts.numpy().tolist()
        if not plan.used:
            return 0.0, counted, totals
        scale = self._scale()
        scale = scale if isinstance(scale, float) else float(scale.numpy())
        norm = self._exchange.step(plan.numbers, gradients, counted if self.update.count else None, scale)
        return norm, counted, totals

    def _traced_train(self, plan: _Plan, kind: tuple[bool, bool], inputs: Any, targets: Any, factor: Any, seeds: Any) -> Any:
        gradients, counted, totals = self._local(plan, kind, inputs, targets, factor, seeds)
        variables = [plan.variables[number] for number in plan.used or ()]
        if not variables:
            return tf.stack([0.0, counted, *totals])
        gradients, norm = self._reducer(gradients, counted if self.update.count else None, self._scale())
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            self.optimizer.apply(gradients, variables)  # leaves out by itself what is not finite, and lowers the scale
        else:
            tf.cond(tf.math.is_finite(norm), lambda: _done(self.optimizer.apply(gradients, variables)), lambda: False)
        return tf.stack([norm, counted, *totals])

    def _traced_gradients(self, plan: _Plan, kind: tuple[bool, bool], *tensors: Any) -> Any:
        gradients, counted, totals = self._local(plan, kind, *tensors)
        if plan.used and self._exchange is not None:
            plan.numbers = self._exchange.numbers([plan.variables[number] for number in plan.used])
            if isinstance(self._exchange, SharedExchange):
                gradients = self._exchange.joined(plan.numbers, gradients)
        return [tf.stack([counted, *totals]), *gradients]

    def _local(self, plan: _Plan, kind: tuple[bool, bool], inputs: Any, targets: Any, factor: Any, seeds: Any) -> Any:
        """This rank's gradients times what it counts for, that number, and the sums of the figures."""
        seeded, has_samples = kind
        inputs, targets = self._batches.own((inputs, targets))
        if seeded:
            for generator, state in zip(self._generators, tf.unstack(seeds, len(self._generators)), strict=True):
                generator.state.assign(tf.cast(state, generator.state.dtype))
        if self._moments is not None:  # every rank must run every layer, without samples too
            self._moments.begin()
            return self._learn(plan, inputs, targets, factor)
        if self.update.micro_batch_size is not None:
            return self._accumulate(plan, inputs, targets, factor, self.update.micro_batch_size)
        if has_samples:
            return self._learn(plan, inputs, targets, factor)

        def idle() -> Any:
            # No constants: TensorFlow would compute what follows from them alone, a reduction too, while others wait for it.
            zero = tf.cast(_length(targets), tf.float32)
            zeros = [tf.fill(plan.variables[n].shape, tf.cast(zero, plan.variables[n].dtype)) for n in plan.used or ()]
            return zeros, zero, [zero for _ in self.figures]

        if plan.used is not None:
            return idle()
        return tf.cond(_length(targets) > 0, lambda: self._learn(plan, inputs, targets, factor), idle)  # to learn what is used

    def _learn(self, plan: _Plan, inputs: Any, targets: Any, factor: Any) -> Any:
        number = tf.cast(_length(targets), tf.float32)
        counted = number if self.update.count is None else tf.cast(self.update.count(targets), tf.float32)
        active = (number > 0) & (counted > 0)
        guarded = self._moments is not None or self.update.count is not None
        if self._moments is not None:
            self._moments.active = active
        if self.update.count is not None:
            factor = self.update.prescale * counted
        with tf.GradientTape() as tape:
            outputs = as_float32(self.model(inputs, training=True))
            loss = tf.reduce_mean(self._loss(targets, outputs))  # a loss given as a function has a value a sample
            if self.model.losses:  # regularisation: the weights of all ranks add up to 1, so it counts once
                loss += tf.add_n([tf.cast(term, loss.dtype) for term in self.model.losses])
            # Weighted before the backward pass, where synchronised layers add up what the ranks send back.
            weighted = loss * tf.cast(factor, loss.dtype)
            if guarded:
                weighted = tf.where(active, weighted, tf.zeros_like(weighted))
            # An optimizer that scales the loss divides the gradients again in apply, after its look for infinities.
            scaled = self.optimizer.scale_loss(weighted)
        found = tape.gradient(scaled, [variable.value for variable in plan.variables])
        used = self._agree(plan, [number for number, gradient in enumerate(found) if gradient is not None])
        gradients = []
        for place in used:
            value = plan.variables[place].value
            gradient = tf.zeros_like(value) if found[place] is None else tf.convert_to_tensor(found[place])
            gradient = tf.ensure_shape(gradient, value.shape)
            gradients.append(tf.where(active, gradient, tf.zeros_like(gradient)) if guarded else gradient)
        means = self._values(targets, outputs, loss)
        sums = [mean * number for mean in means]
        if self.update.count is not None:
            sums[0] = means[0] * counted
        if guarded:
            sums = [tf.where(active, total, tf.zeros_like(total)) for total in sums]
        return gradients, counted, sums

    def _accumulate(self, plan: _Plan, inputs: Any, targets: Any, factor: Any, size: int) -> Any:
        """The same as ``_learn``, in pieces of ``size`` samples; ranks may have different numbers of them, or none."""
        number = _length(targets)
        zeros = [tf.zeros_like(variable.value) for variable in plan.variables]

        def piece(start: Any, sums: list[Any], counted: Any, totals: list[Any]) -> Any:
            stop = tf.minimum(start + size, number)
            part_inputs, part_targets = tf.nest.map_structure(lambda tensor: tensor[start:stop], (inputs, targets))
            share = tf.cast(stop - start, tf.float32) / tf.cast(number, tf.float32)
            gradients, more, added = self._learn(plan, part_inputs, part_targets, factor * share)
            for place, gradient in zip(plan.used or (), gradients, strict=True):
                sums[place] += gradient
            return stop, sums, counted + more, [total + value for total, value in zip(totals, added, strict=True)]

        begin = (tf.constant(0), zeros, tf.constant(0.0), [tf.constant(0.0) for _ in self.figures])
        _, sums, counted, totals = tf.while_loop(lambda start, *_: start < number, piece, begin)
        return [sums[place] for place in plan.used or ()], counted, totals

    def _agree(self, plan: _Plan, found: list[int]) -> list[int]:
        """Collective when the step is traced for the first time. A gradient that no rank has is not applied."""
        if plan.used is None:
            with tf.init_scope():
                everyone = self._comm.allgather(found, name="training step/used variables")
            plan.used = sorted({number for theirs in everyone for number in theirs})
        if late := set(found) - set(plan.used):
            raise HvdtrainError(
                f"{plan.variables[min(late)].path} gets a gradient from a batch of another shape, and got none before",
                "a model must use the same variables in every step",
            )
        return plan.used

    def _scale(self) -> Any:
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            return self.optimizer.dynamic_scale.value
        return float(self.optimizer.loss_scale_factor or 1.0)

    def _not_finite(self, plan: _Plan, kind: tuple[bool, bool], inputs: Any, targets: Any, factor: Any, seeds: Any) -> None:
        """Collective. Raise what went wrong on which rank, unless it is an overflow that a lower scale may mend."""
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer) and float(self.optimizer.dynamic_scale.value) >= 1:
            return
        if self.update.process_sets:  # the other sets know nothing of it
            raise HvdtrainError("the gradients of this process set are not finite", "lower the learning rate or check the data")
        local = tf.function(lambda *tensors: self._local(plan, kind, *tensors), autograph=False)
        gradients, _, totals = local(inputs, targets, factor, seeds)
        bad = [
            plan.variables[number].path
            for number, gradient in zip(plan.used or (), gradients, strict=True)
            if not np.isfinite(gradient.numpy()).all()
        ]
        blame(bad, float(totals[0]) / max(_count(targets), 1), socket.gethostname(), self._comm)

    def _traced_evaluate(self, inputs: Any, targets: Any) -> Any:
        outputs = as_float32(self.model(inputs, training=False))
        number = tf.cast(_length(targets), tf.float32)
        return outputs, [value * number for value in self._values(targets, outputs, self._loss(targets, outputs))]

    def _values(self, targets: Any, outputs: Any, loss: Any) -> list[Any]:
        figures = {name: loss if name == "loss" else figure(targets, outputs) for name, figure in self.figures.items()}
        return [tf.reduce_mean(tf.cast(value, tf.float32)) for value in figures.values()]

    def _factor(self, value: float) -> Any:
        """It is the same in nearly every step."""
        if self._last_factor[0] != value:
            self._last_factor = value, tf.constant(value, tf.float32)
        return self._last_factor[1]


def set_lr(optimizer: Any, lr: float) -> None:
    """Make ``lr`` the learning rate of the next update.

    Raises:
        UsageError: the optimizer has a schedule of its own.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.Variable) and rate.value.numpy() == np.float32(lr):
        return  # to find it equal is faster than to assign it
    try:
        optimizer.learning_rate = lr
    except (TypeError, AttributeError) as error:
        raise UsageError(
            f"the recipe's lr cannot be set: {error}",
            "give the optimizer a plain learning rate, or leave lr out of the recipe",
        ) from None


def set_precision(layers: list[Any], precision: str) -> None:
    """Compute in it where a layer's policy is plain float32."""
    if precision != "float32":
        for layer in layers:
            if layer.compute_dtype == "float32" and layer.variable_dtype == "float32":
                layer.dtype_policy = f"mixed_{precision}"


def _with_loss_scale(optimizer: Any, layers: list[Any]) -> Any:
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor
    if scales or all(layer.compute_dtype != "float16" for layer in layers):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _seeds(seed: int, number: int) -> Any:
    """A state of two numbers for each of ``number`` random streams, all different."""
    words = np.random.SeedSequence(seed % (1 << 64)).generate_state(2 * number, np.uint32)
    return words.reshape(number, 2).astype(np.int64)


def _length(targets: Any) -> Any:
    return tf.shape(tf.nest.flatten(targets)[0])[0]


def _count(targets: Any) -> int:
    return int(tf.nest.flatten(targets)[0].shape[0])


def as_float32(outputs: Any) -> Any:
    """A model's outputs as loss and metrics are to have them."""

    def cast(output: Any) -> Any:
        if output.dtype not in (tf.float16, tf.bfloat16):
            return output
        result = tf.cast(output, tf.float32)
        result._keras_mask = getattr(output, "_keras_mask", None)  # which the loss looks at
        return result

    return tf.nest.map_structure(cast, outputs)


def _done(_: object) -> bool:
    return True
