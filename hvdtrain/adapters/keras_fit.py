"""``model.fit`` on several ranks: what the optimizer, the training step and the metrics do otherwise than on one.

Only instances are changed, and only while they train, so that whatever is saved is plain Keras.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import consistency
from hvdtrain.adapters import blame, keras_norm, keras_state, refuse_sum
from hvdtrain.adapters.keras_reducer import Reducer
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.update import Update

log = logging.getLogger(__name__)

_MARK = "_hvdtrain"


@dataclass
class _Step:
    """The step that is being traced or run: how many samples this rank brings to it; None outside of ``fit``."""

    count: Any = None


_step = _Step()


class Averaging:
    """Makes one optimizer reduce the gradients before it applies them, weighted by the ranks' samples in the step."""

    made = 0

    def __init__(self, optimizer: Any, update: Update, comm: Communicator) -> None:
        # Optimizers are made in the same order on every rank, so their reductions have the same names.
        self._reducer = Reducer(update, f"optimizer.{Averaging.made}.")
        Averaging.made += 1
        self.update, self.size, self._comm = update, comm.world.size, comm
        self.hvd = self._reducer.connect(comm.world.rank, comm.world.size)
        self.attach(optimizer)

    def sum(self, tensor: Any, name: str) -> Any:
        """Collective. The sum over all ranks."""
        return self._reducer.sum(tensor, name)

    def attach(self, optimizer: Any) -> None:
        plain = type(optimizer)
        self._scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or bool(optimizer.loss_scale_factor)
        # Reduced once per update: after the accumulation, before clipping.
        late = bool(optimizer.gradient_accumulation_steps) and hasattr(plain, "_clip_gradients")

        def apply(gradients: Any, trainable_variables: Any = None) -> Any:
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            gradients = self._scaled(gradients, variables) if late else self._reduced(gradients, variables)
            return plain.apply(optimizer, gradients, trainable_variables)

        object.__setattr__(optimizer, "apply", apply)
        if late:
            object.__setattr__(
                optimizer,
                "_clip_gradients",
                lambda gradients: plain._clip_gradients(optimizer, self._sum(gradients, optimizer._trainable_variables)),
            )
        object.__setattr__(optimizer, _MARK, self)

    def detach(self, optimizer: Any) -> None:
        for name in ("apply", "_clip_gradients", _MARK):
            optimizer.__dict__.pop(name, None)

    def _reduced(self, gradients: Any, variables: Sequence[Any]) -> list[Any]:
        counted = self._count()
        factor = self.update.prescale * counted if self.update.op == "exact" else self.update.factor(1.0, self.size)
        counted = counted if self.update.op == "exact" else None
        return self._over_ranks(_times(gradients, variables, factor, self._count()), counted, variables)

    def _scaled(self, gradients: Any, variables: Sequence[Any]) -> list[Any]:
        counted = self._count()
        if self.update.op != "exact":
            return _times(gradients, variables, self.update.factor(1.0, self.size), counted)
        whole = self._reducer.sum(counted, "count")
        return _times(gradients, variables, self.update.prescale * tf.math.divide_no_nan(counted, whole), counted)

    def _sum(self, gradients: Any, variables: Sequence[Any]) -> list[Any]:
        return self._over_ranks(list(gradients), None, variables)

    def _over_ranks(self, gradients: list[Any], counted: Any, variables: Sequence[Any]) -> list[Any]:
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        own = [gradients[number] for number in there]
        found, norm = self._reducer(own, counted, tf.constant(1.0))
        if not self._scales:  # which leaves an update out where gradients overflow
            names = [variables[number].path for number in there]
            with tf.control_dependencies([tf.cond(tf.math.is_finite(norm), lambda: False, lambda: self._blame(own, names))]):
                found = [tf.identity(gradient) for gradient in found]  # nothing is applied before it was looked at
        for number, gradient in zip(there, found, strict=True):
            gradients[number] = gradient
        return gradients

    def _blame(self, gradients: list[Any], names: list[str]) -> Any:
        """Collective. End ``fit`` on all ranks with the name of the rank and the variable."""

        def end(*flags: Any) -> bool:
            bad = [name for name, is_finite in zip(names, flags, strict=True) if not bool(is_finite)]
            blame(bad, None, socket.gethostname(), self._comm)

        flags = [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients]
        result = tf.py_function(end, flags, tf.bool)
        result.set_shape(())
        return result

    def _count(self) -> Any:
        """Outside of ``fit`` all ranks count alike."""
        return tf.constant(1.0) if _step.count is None else tf.cast(_step.count, tf.float32)


def _times(gradients: Any, variables: Sequence[Any], factor: Any, counted: Any) -> list[Any]:
    def scaled(gradient: Any, variable: Any) -> Any:
        if gradient is None:
            return None
        gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
        # Of no samples it may be anything, NaN too.
        return tf.where(counted > 0, gradient * tf.cast(factor, gradient.dtype), tf.zeros_like(gradient))

    return [scaled(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]


def averaging(optimizer: Any) -> Averaging | None:
    """What ``distribute`` gave this optimizer."""
    return getattr(optimizer, _MARK, None)


class Ranks(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes ``fit`` and ``evaluate`` those of one process; to be the first of the callbacks."""

    #: lets Keras run the steps ahead of the callbacks
    async_safe = True

    def __init__(self, comm: Communicator, hosts: tuple[str, ...], *, check: bool = True) -> None:
        super().__init__()
        self._comm, self._hosts, self._check = comm, hosts, check
        self._training = self._in_step = False
        self._epoch_open = False
        self._figures: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # of the epoch: this rank's, and all ranks'
        self._layers: list[Any] = []
        self._progress = tf.Variable(tf.zeros(3, tf.float64), trainable=False)  # steps, samples, a sum over the data

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        if params and not self._comm.world.is_primary:
            params["verbose"] = 0  # the same object is given to the progress bar afterwards

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective. Every rank starts with the primary's weights and optimizer."""
        model = self.model
        self._training = True
        self._layers = list(model._flatten_layers())
        steps = [known for known, *_ in self._same("batches an epoch", self.params.get("steps"))]
        if None in steps:  # a rank that has more than the others would wait for them without end
            raise UsageError(
                "the number of batches of the training data is not known",
                "fit(steps_per_epoch=N) with a data set that repeats, or dataset.apply(tf.data.experimental.assert_cardinality(N))",
            ).everywhere()
        self._prepare_optimizer()
        _refuse_xla(model)
        for loss in tf.nest.flatten(model.loss):
            refuse_sum(loss)
            if getattr(loss, "reduction", None) == "mean_with_sample_weight":
                raise UsageError(
                    f"the loss {type(loss).__name__} divides by the sum of its weights, which is another one on each rank",
                    "leave its reduction at the default, or use a recipe with Update(count=...)",
                ).everywhere()
        tensors = keras_state.arrays(model, model.optimizer)
        consistency.check_shapes(tensors, self._comm, self._hosts)
        keras_state.broadcast(model, model.optimizer, self._comm, self._averaging.hvd)
        for number, generator in enumerate(keras_state.generators(model)):
            key = [int(part) % (1 << 64) for part in generator.state.value.numpy().tolist()]
            words = np.random.SeedSequence([*key, number, self._comm.world.rank]).generate_state(2, np.uint32)
            generator.state.assign(words.astype(np.int64))
        self._hook_metrics()
        synced = [layer for layer in keras_norm.layers(model) if layer.synchronized]
        self._moments = keras_norm.SyncedMoments(synced, self._averaging.sum, self._comm.world.rank, self._comm.world.size)
        alone = [layer for layer in self._layers if not any(layer is each for each in synced)]
        self._own = keras_state.gathered(alone)
        plain = model.train_step
        object.__setattr__(model, "train_step", lambda data: self._train_step(plain, data))
        model.make_train_function(force=True)

    def on_train_end(self, logs: Any = None) -> None:
        self._training = False
        self._moments.detach()
        for name in ("train_step", "get_metrics_result"):
            self.model.__dict__.pop(name, None)
        self.model.train_function = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_open = True
        self._progress.assign(tf.zeros(3, tf.float64))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective. The callbacks that follow see the same figures on every rank, and decide alike."""
        self._end_epoch()
        if logs is not None:
            self._agree_on(logs)
        if self._check:
            consistency.check_values(keras_state.arrays(self.model, self.model.optimizer), self._comm, self._hosts)

    def _agree_on(self, logs: dict[str, Any]) -> None:
        """Collective. A training step of the user's may tell figures of its own: of a metric, those over all samples."""
        mine, whole = self._figures
        told = {name for name, value in mine.items() if name in logs and _equal(value, logs[name])}
        everyone = self._comm.allgather((dict(logs), told), name="fit/logs")
        for name in logs:
            values = [theirs.get(name, np.nan) for theirs, _ in everyone]
            if any(name in names for _, names in everyone):
                logs[name] = float(whole[name])
            elif not all(_equal(value, values[0]) for value in values):
                logs[name] = float(np.mean(values))

    def on_test_begin(self, logs: Any = None) -> None:
        if not self._training:
            self._hook_metrics()

    def on_test_end(self, logs: Any = None) -> None:
        if not self._training:
            self.model.__dict__.pop("get_metrics_result", None)

    def _prepare_optimizer(self) -> None:
        """Reduce where the outermost optimizer looks for infinities; also for a model that was loaded from a file."""
        outer = self.model.optimizer
        inner = getattr(outer, "inner_optimizer", None)
        found = averaging(outer)
        if found is None and inner is not None and (found := averaging(inner)) is not None:
            found.detach(inner)
            found.attach(outer)
        if found is None:
            found = Averaging(outer, Update(), self._comm)
        self._averaging = found
        if not outer.built:
            outer.build(self.model.trainable_variables)

    def _train_step(self, plain: Any, data: Any) -> Any:
        tensors = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
        count = tf.shape(tensors[0])[0]
        empty = tf.equal(count, 0)
        kept = self._own + list(self.model.metrics_variables)
        can_be_empty = tensors[0].shape[0] in (None, 0)
        before = [tf.identity(variable.value) for variable in kept] if can_be_empty else []
        if can_be_empty:  # a rank without samples takes part with one of zeros that counts for nothing
            data = tf.nest.map_structure(lambda tensor: None if tensor is None else _filled(tensor, empty), data)
        first = tensors[0]
        seen = tf.reduce_sum(tf.cast(first, tf.float64)) if first.dtype.is_floating else tf.constant(0.0, tf.float64)
        self._progress.assign_add(tf.stack([tf.constant(1.0, tf.float64), tf.cast(count, tf.float64), seen]))
        self._moments.begin()
        self._moments.active = self._moments.present = tf.logical_not(empty)
        if self._averaging.update.op == "exact":
            self._moments.part = tf.maximum(count, 1)
        _step.count, self._in_step = count, True
        try:
            result = plain(data)
        finally:
            _step.count, self._in_step = None, False
        if can_be_empty:
            tf.cond(empty, lambda: _assigned(kept, before), lambda: False)
        return result

    def _hook_metrics(self) -> None:
        """Let the model's metrics tell what they are over all ranks' samples."""
        model = self.model
        plain = model.get_metrics_result

        def get_metrics_result() -> Any:
            variables = list(model.metrics_variables)
            if self._in_step or not tf.executing_eagerly() or not variables:
                return plain()
            ended = self._training and self._epoch_open
            if ended:
                self._end_epoch()
            mine, before = [variable.value.numpy() for variable in variables], plain()
            _assigned(variables, keras_state.metric_sums(variables, self._comm))
            result = plain()
            _assigned(variables, mine)
            if ended:
                self._figures = before, result
            return result

        object.__setattr__(model, "get_metrics_result", get_metrics_result)

    def _end_epoch(self) -> None:
        """Collective. The ranks have taken as many steps, on other samples, and hold the same moving statistics."""
        if not self._epoch_open:
            return
        self._epoch_open = False
        steps, samples, seen = self._progress.numpy().tolist()
        everyone = self._same("batches in this epoch", int(steps), samples, seen)
        if samples and len(set(everyone)) == 1:
            log.warning(
                "all %d ranks trained on the same samples: divide them with hvdtrain.keras.shard(data, batch_size=...)",
                self._comm.world.size,
            )
        keras_state.settle(self._layers, self._comm, samples)

    def _same(self, what: str, mine: Any, *more: Any) -> list[Any]:
        """Collective. Raise HvdtrainError, naming the rank, if the ranks differ; what each of them brings."""
        everyone = self._comm.allgather((mine, *more), name=f"fit/{what}")
        for rank, theirs in enumerate(everyone):
            if theirs[0] != everyone[0][0]:
                raise HvdtrainError(
                    f"rank {rank} on {self._hosts[rank]} has {theirs[0]} {what}, rank 0 has {everyone[0][0]}",
                    "give every rank as many: hvdtrain.keras.shard(data) does, or steps_per_epoch=N with a repeated data set",
                ).everywhere()
        return everyone


def _refuse_xla(model: Any) -> None:
    """Horovod's reductions do not run inside XLA: the choice that Keras makes by itself is taken back, a wish is refused."""
    asked = (model.get_compile_config() or {}).get("jit_compile", "auto")
    if asked is True:
        raise UsageError(
            "compile(jit_compile=True): Horovod's reductions do not run inside XLA", "leave it out, or jit_compile=False"
        ).everywhere()
    model.jit_compile = False


def _filled(tensor: Any, empty: Any) -> Any:
    rows = tf.stack([tf.constant(0), tf.cast(empty, tf.int32)])
    result = tf.pad(tensor, tf.concat([rows[None], tf.zeros((tensor.shape.rank - 1, 2), tf.int32)], 0))
    return tf.ensure_shape(result, [None, *tensor.shape[1:]])


def _equal(first: Any, second: Any) -> bool:
    return bool(np.array_equal(np.asarray(first, float), np.asarray(second, float), equal_nan=True))


def _assigned(variables: Sequence[Any], values: Sequence[Any]) -> bool:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return True
