"""Keras 3 on TensorFlow: one traced step, gradients reduced by Horovod before the optimizer's own update.

Horovod's Keras wrapper is not used: under Keras 3 it fails (variables have no ``ref``), and on some paths would not
average at all, because Keras 3 calls ``apply`` and no longer the method that the wrapper overrides.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.adapters import batch_pair, refuse_sum
from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.horovod import require
from hvdtrain.metrics import Mean, Means

#: a figure of (targets, outputs), in Keras' order: a value a sample, or their mean
Figure = Callable[[Any, Any], Any]


class KerasAdapter:
    """One replica of a ``keras.Model``.

    Args:
        model: a built model (with an ``Input``).
        optimizer: a Keras optimizer or its name.
        loss: a Keras loss (an object, a function of (targets, outputs), or a name): a value a sample, or their mean.
        metrics: functions of (targets, outputs) by name, for example ``keras.metrics.sparse_categorical_accuracy``.
    """

    framework = "tensorflow"

    def __init__(self, model: Any, optimizer: Any, *, loss: str | Figure, metrics: Mapping[str, Figure] | None = None) -> None:
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
        _check_metrics(metrics)
        self.model = model
        self.optimizer = keras.optimizers.get(optimizer)
        self.optimizer.build(model.trainable_variables)
        self._loss: Figure = keras.losses.get(loss)
        refuse_sum(self._loss)
        self.figures = {"loss": self._loss, **(metrics or {})}
        self.owns_state = True
        self._reduce: Callable[[list[Any]], list[Any]] = list
        self._train, self._evaluate = _Traced(self._traced_train), _Traced(self._traced_evaluate)

    def setup(self, comm: Communicator) -> None:
        self._comm = comm
        self.owns_state = comm.world.is_primary
        if comm.world.size > 1:
            require("tensorflow")
            import horovod.tensorflow as hvd

            hvd.init()
            self._hvd = hvd
            self._reduce = self._allreduce

    def sync(self, root: int = 0) -> None:
        if self._comm.world.size == 1:
            return
        for number, variable in enumerate(self._variables()):
            name = f"state.{number}"
            if variable.dtype in ("uint32", "uint64"):  # the state of random generators; Horovod carries no such type
                variable.assign(self._comm.broadcast(variable.value.numpy(), name=name, root=root))
            else:
                variable.assign(self._hvd.broadcast(variable.value, root_rank=root, name=name))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for kind, owner in (("model", self.model), ("optimizer", self.optimizer)):
            for variable in owner.variables:
                yield f"{kind}/{variable.path}", variable.value.numpy()

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        if lr is not None:
            self._set_lr(lr)
        inputs, targets, count = self._tensors(batch)
        return self._means(self._train(inputs, targets, tf.constant(weight, tf.float32)), count)

    def settle(self) -> None:
        pass

    def eval_end(self) -> Mapping[str, float]:
        return {}

    def eval_step(self, batch: Any) -> Means:
        inputs, targets, count = self._tensors(batch)
        if not count:
            return dict.fromkeys(self.figures, Mean())
        return self._means(self._evaluate(inputs, targets), count)

    def save(self, directory: Path) -> None:
        # HDF5 ends the whole process when the disk runs full under it (seen with h5py 3.14), so ask first.
        needed = sum(math.prod(variable.shape) * 8 for variable in self._variables()) + (1 << 16)
        if shutil.disk_usage(directory).free < needed:
            raise OSError(errno.ENOSPC, f"no space for {needed:,} bytes", str(directory))
        self.model.save_weights(directory / "model.weights.h5")
        np.savez(directory / "optimizer.npz", *[variable.value.numpy() for variable in self.optimizer.variables])

    def load(self, directory: Path) -> None:
        self.model.load_weights(directory / "model.weights.h5")
        with np.load(directory / "optimizer.npz", allow_pickle=False) as saved:
            if len(saved) != len(self.optimizer.variables):
                raise ValueError(f"{len(saved)} optimizer variables, the recipe's has {len(self.optimizer.variables)}")
            for number, variable in enumerate(self.optimizer.variables):
                variable.assign(saved[f"arr_{number}"])

    def _traced_train(self, inputs: Any, targets: Any, weight: Any) -> list[Any]:
        variables = self.model.trainable_variables
        used: list[int] = []

        def learn() -> tuple[list[Any], list[Any]]:
            with tf.GradientTape() as tape:
                outputs = self.model(inputs, training=True)
                loss = tf.reduce_mean(self._loss(targets, outputs))  # a loss given as a function has a value a sample
                if self.model.losses:  # regularisation: the weights of all ranks add up to 1, so it counts once
                    loss += tf.add_n([tf.cast(term, loss.dtype) for term in self.model.losses])
                # An optimizer that scales the loss divides the gradients again in apply, after its look for infinities.
                weighted = self.optimizer.scale_loss(loss * tf.cast(weight, loss.dtype))
            gradients = tape.gradient(weighted, [variable.value for variable in variables])
            used.extend(number for number, gradient in enumerate(gradients) if gradient is not None)
            return [tf.convert_to_tensor(gradients[number]) for number in used], self._values(targets, outputs, loss)

        def idle() -> tuple[list[Any], list[Any]]:
            """A rank without samples: zeros for the sum, and no figures (their count is 0)."""
            return [tf.zeros_like(variables[number].value) for number in used], [tf.zeros(()) for _ in self.figures]

        gradients, values = tf.cond(tf.shape(tf.nest.flatten(targets)[0])[0] > 0, learn, idle)
        self.optimizer.apply(self._reduce(gradients), [variables[number] for number in used])
        return list(values)

    def _traced_evaluate(self, inputs: Any, targets: Any) -> list[Any]:
        outputs = self.model(inputs, training=False)
        return self._values(targets, outputs, self._loss(targets, outputs))

    def _allreduce(self, gradients: list[Any]) -> list[Any]:
        # Named by position, not by TensorFlow, whose names count traces and would differ between ranks.
        return [
            self._hvd.allreduce(gradient, op=self._hvd.Sum, name=f"gradient.{number}", ignore_name_scope=True)
            for number, gradient in enumerate(gradients)
        ]

    def _values(self, targets: Any, outputs: Any, loss: Any) -> list[Any]:
        figures = {name: loss if name == "loss" else figure(targets, outputs) for name, figure in self.figures.items()}
        return [tf.reduce_mean(tf.cast(value, tf.float32)) for value in figures.values()]

    def _means(self, values: list[Any], count: int) -> Means:
        return {name: Mean.of(value, count) for name, value in zip(self.figures, values, strict=True)}

    def _tensors(self, batch: Any) -> tuple[Any, Any, int]:
        inputs, targets, count = batch_pair(batch)
        return tf.nest.map_structure(tf.convert_to_tensor, inputs), tf.nest.map_structure(tf.convert_to_tensor, targets), count

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def _set_lr(self, lr: float) -> None:
        try:
            self.optimizer.learning_rate = lr
        except (TypeError, AttributeError) as error:
            raise UsageError(
                f"the recipe's lr cannot be set: {error}",
                "give the optimizer a plain learning rate, or leave lr out of the recipe",
            ) from None


def _check_metrics(metrics: Any) -> None:
    hint = 'give functions by name: metrics={"accuracy": keras.metrics.sparse_categorical_accuracy}'
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics must be a dict of functions, got a {type(metrics).__name__}", hint)
    for name, figure in (metrics or {}).items():
        if isinstance(figure, keras.metrics.Metric):  # it adds up by itself, over training and validation alike
            raise UsageError(f"the metric {name!r} is an object that keeps a state, {type(figure).__name__}", hint)
        if not callable(figure):
            raise UsageError(f"the metric {name!r} must be a function of (targets, outputs), got {figure!r}", hint)


class _Traced:
    """A ``tf.function`` of (inputs, targets, ...) that leaves open the number of samples and each axis seen to vary.

    So a short last batch does not trace it anew, and sequences padded to another length do once.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature: list[Any] = []
        self._traced: Any = None

    def __call__(self, *tensors: Any) -> Any:
        given = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tf.nest.flatten(tensors)]
        if not self._signature:
            self._signature = [tf.TensorSpec((None, *spec.shape[1:]) if spec.shape.rank else (), spec.dtype) for spec in given]
        elif all(spec.is_subtype_of(known) for known, spec in zip(self._signature, given, strict=True)):
            return self._traced(*tensors)
        else:
            pairs = zip(self._signature, given, strict=True)
            self._signature = [known.most_specific_common_supertype([spec]) or spec for known, spec in pairs]
        signature = tf.nest.pack_sequence_as(list(tensors), self._signature)
        self._traced = tf.function(self._function, input_signature=signature)
        return self._traced(*tensors)
