"""Keras' sides: a hand-written loop without exchange and with Horovod's tape, and ``fit`` under MultiWorkerMirroredStrategy.

Batches of the loops lie in memory as tensors, so they spend no time on loading. The loss is read every ten steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from . import keras_models, tasks
from .laps import Laps
from .tasks import Task


def none(task: Task, laps: Laps) -> None:
    """Every rank trains by itself."""
    _loop(task, laps, tape=lambda tape: tape, begin=lambda variables: None)


def horovod(task: Task, laps: Laps) -> None:
    """Horovod's ``DistributedGradientTape`` with its defaults.

    Its Keras wrapper (``hvd.DistributedOptimizer``) fails under Keras 3; and variables are to be given as TensorFlow's own.
    """
    import horovod.tensorflow as hvd

    hvd.init()
    _loop(task, laps, tape=hvd.DistributedGradientTape, begin=lambda variables: hvd.broadcast_variables(variables, 0))
    hvd.shutdown()


def mwms(task: Task, laps: Laps) -> None:
    """``fit`` under ``MultiWorkerMirroredStrategy``. As it is in Keras 3.15.1 it fails, twice: see the two patches."""
    from keras.src.backend.tensorflow import trainer

    workers = os.environ["BENCHMARK_WORKERS"].split(",")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": laps.rank}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer, loss = keras_models.build(task.name)
        model.compile(optimizer, loss)
    # 1: it asks the strategy to reduce a batch, a tuple, which takes tensors only. The model is built, nothing is to be done.
    model._maybe_symbolic_build = lambda *args, **more: None
    # 2: it averages scalar figures over axis 0, which they do not have. Without that each worker shows its own, which is faster.
    trainer.reduce_per_replica = lambda values, strategy, reduction: values
    data = tf.data.Dataset.from_tensor_slices(tasks.data(task, channels_first=False))
    data = data.batch(len(workers) * task.batch, drop_remainder=True).take(64).cache().repeat()
    end = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: laps.lap())
    model.fit(data, steps_per_epoch=task.steps, callbacks=[end], verbose=0)
    laps.write()


def _loop(task: Task, laps: Laps, *, tape: Any, begin: Any) -> None:
    pairs = tasks.batches(task, laps.rank, channels_first=False)
    batches = [(tf.constant(inputs), tf.constant(targets)) for inputs, targets in pairs]
    model, optimizer, loss = keras_models.build(task.name)
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]
    begin(variables)

    @tf.function
    def train_step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as recorded:
            value = loss(targets, model(inputs, training=True))
        gradients = tape(recorded).gradient(value, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    for step in range(task.steps):
        value = train_step(*batches[step % len(batches)])
        laps.lap()
        if step % tasks.ROUND == tasks.ROUND - 1:
            float(value)
    laps.write()


SIDES: dict[str, Callable[[Task, Laps], None]] = {"none": none, "mwms": mwms, "horovod": horovod}
