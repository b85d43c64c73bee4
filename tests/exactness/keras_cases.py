"""Twenty steps of each feature in Keras: run on 1, 2 or 3 ranks, the weights must be those of one process.

``python -m tests.exactness.keras_cases OUT [CASE ...]`` runs them one after another, as one rank of whatever job it is in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain import lr
from hvdtrain.adapters.keras import KerasAdapter
from hvdtrain.comm.connect import connect
from hvdtrain.config import Options
from hvdtrain.data.sampler import Share
from hvdtrain.errors import HvdtrainError
from hvdtrain.state import TrainState
from hvdtrain.trainer import Trainer
from tests.support.recipes import CLASSES, FEATURES, arrays

STEPS, BATCH, SAMPLES = 20, 61, 307  # every sixth batch is a tail of 2: with 3 ranks one has no sample
WORDS, LENGTH = 40, 7
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(*, norm: bool = False, **more: Any) -> Any:
    # No bias before the normalisation, which takes it out again: its gradient would be rounding and nothing else.
    layers = [keras.layers.Dense(33, use_bias=not norm), keras.layers.Activation("tanh"), keras.layers.Dense(CLASSES)]
    if norm:
        layers.insert(1, keras.layers.BatchNormalization(momentum=0.9, **more))
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def sgd(rate: float = 0.05, **more: Any) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9, **more)


def recipe(model: Any, optimizer: Any, *, loss: Any = CROSS_ENTROPY, data: Any = None, **more: Any) -> hvdtrain.Recipe:
    adapter = KerasAdapter(model, optimizer, loss=loss, update=more.pop("update", hvdtrain.Update()))
    return hvdtrain.Recipe(
        **{"adapter": adapter, "train": data or arrays(SAMPLES), "batch_size": BATCH, "epochs": 99, "seed": 5} | more
    )


def updated(**update: Any) -> hvdtrain.Recipe:
    return recipe(mlp(), sgd(), update=hvdtrain.Update(**update))


class AtStep(hvdtrain.Callback):
    def __init__(self, actions: dict[int, Callable[[], Any]]) -> None:
        self.actions = actions

    def on_step_end(self, state: TrainState) -> None:
        self.actions.get(state.step, lambda: None)()


def float16_with_overflow() -> hvdtrain.Recipe:
    """After step 5 the scale is too high for any rank: the next update is left out, and the scale comes down."""
    made = updated(precision="float16")
    scale = made.adapter.optimizer.dynamic_scale  # type: ignore[attr-defined]
    return replace(made, callbacks=(AtStep({5: lambda: scale.assign(2.0**30), 6: lambda: scale.assign(2.0**10)}),))


def tokens(batch_size: int = BATCH, **update: Any) -> hvdtrain.Recipe:
    """Words, and the next words: -1 where there is none. Some sentences have none at all, and no mean."""
    random = np.random.default_rng(3)
    words = random.integers(0, WORDS, (SAMPLES, LENGTH))
    lengths = random.integers(0, LENGTH + 1, SAMPLES) * (random.random(SAMPLES) > 0.3)
    targets = np.where(np.arange(LENGTH) < lengths[:, None], np.roll(words, -1, axis=1), -1)

    def loss(targets: Any, outputs: Any) -> Any:
        known = tf.cast(targets >= 0, tf.float32)
        each = keras.losses.sparse_categorical_crossentropy(tf.maximum(targets, 0), outputs, from_logits=True)
        return tf.reduce_sum(each * known) / tf.reduce_sum(known)

    counted = hvdtrain.Update(count=lambda targets: tf.reduce_sum(tf.cast(targets >= 0, tf.float32)), **update)
    model = keras.Sequential([keras.Input((LENGTH,)), keras.layers.Embedding(WORDS, 6), keras.layers.Dense(WORDS)])
    return recipe(model, sgd(0.5), loss=loss, data=(words, targets), update=counted, batch_size=batch_size)


def embedding() -> hvdtrain.Recipe:
    random = np.random.default_rng(3)
    words = random.integers(0, WORDS, (SAMPLES, LENGTH))
    layers = [keras.Input((LENGTH,)), keras.layers.Embedding(WORDS, 6), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return recipe(
        keras.Sequential(layers), keras.optimizers.Adam(0.01, epsilon=1e-4), data=(words, arrays(SAMPLES)[1]), batch_size=4
    )


class Unusual(keras.Model):
    """A frozen layer, one whose weights are used twice, regularisation, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = keras.layers.Dense(FEATURES)
        self.tied = keras.layers.Dense(FEATURES, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        self.unused = keras.layers.Dense(FEATURES)
        self.head = keras.layers.Dense(CLASSES)

    def build(self, shape: Any) -> None:
        for layer in (self.frozen, self.tied, self.unused, self.head):
            layer.build((None, FEATURES))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.head(self.tied(self.tied(self.frozen(inputs))))


def unusual() -> Any:
    model = Unusual()
    model.build((None, FEATURES))
    return model


def frozen() -> hvdtrain.Recipe:
    model = unusual()
    made = recipe(model, sgd(weight_decay=0.01))
    model.frozen.trainable = False
    return replace(made, callbacks=(AtStep({8: lambda: setattr(model.frozen, "trainable", True)}),))


def batch_norm(batch_size: int = BATCH, **more: Any) -> hvdtrain.Recipe:
    update = hvdtrain.Update(sync_batch_norm=not more)
    return recipe(mlp(norm=True, **more), sgd(0.02), update=update, data=arrays(290), batch_size=batch_size)


def batch_norm_of_two() -> hvdtrain.Recipe:
    """On 3 ranks one has no sample. A large epsilon: two samples of nearly one value are normalised to anything."""
    return recipe(mlp(norm=True, epsilon=1.0), sgd(0.01), update=hvdtrain.Update(sync_batch_norm=True), batch_size=2)


def batch_norm_images() -> hvdtrain.Recipe:
    """Twice through one layer, and images."""
    inputs = keras.Input((FEATURES,))
    norm = keras.layers.BatchNormalization(momentum=0.9)
    image = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(keras.layers.Reshape((3, 4, 1))(inputs))
    image = norm(keras.layers.Conv2D(4, 3, padding="same", activation="relu")(norm(image)))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(image)))
    return recipe(model, sgd(0.02), update=hvdtrain.Update(sync_batch_norm=True), data=arrays(290))


#: feature -> recipe
CASES: dict[str, Callable[[], hvdtrain.Recipe]] = {
    "momentum, weight decay": lambda: recipe(mlp(), sgd(weight_decay=0.01)),
    # Adam divides a gradient by its own size: where it is nearly zero, an epsilon of 1e-7 shows its rounding.
    "Adam": lambda: recipe(mlp(), keras.optimizers.Adam(0.004, weight_decay=0.1, epsilon=1e-4)),
    "micro-batches": lambda: updated(micro_batch_size=7),
    "clip by global norm": lambda: updated(clip_norm=0.1),
    "clip by value": lambda: updated(clip_value=0.01),
    "micro-batches, clipped": lambda: updated(micro_batch_size=7, clip_norm=0.1),
    "bfloat16": lambda: updated(precision="bfloat16"),
    "float16, overflow": float16_with_overflow,
    "float16, clipped": lambda: updated(precision="float16", clip_norm=0.1),
    "schedule with warm-up": lambda: recipe(mlp(), sgd(), lr=lr.warmup(lr.cosine(0.1, STEPS), 5)),
    "embedding, Adam": embedding,
    "unused layer, tied weights": lambda: recipe(unusual(), sgd(weight_decay=0.01)),
    "frozen layer, unfrozen later": frozen,
    "mean over tokens": tokens,
    "mean over tokens, micro-batches": lambda: tokens(micro_batch_size=7),
    "mean over tokens, batches of 2": lambda: tokens(2),
    "synchronised batch norm": batch_norm,
    "synchronised batch norm, in the layer": lambda: batch_norm(synchronized=True),
    "synchronised batch norm, images": batch_norm_images,
    "synchronised batch norm, batches of 2": batch_norm_of_two,
    "unequal shares": batch_norm,
    "batches of 2": lambda: recipe(mlp(), sgd(0.02), batch_size=2),
    "average of equal parts": lambda: recipe(
        mlp(), sgd(), data=arrays(300), batch_size=60, update=hvdtrain.Update(op="average")
    ),
}


def started(made: hvdtrain.Recipe, comm: Any, **options: Any) -> Trainer:
    trainer = Trainer(made, comm, options=Options(**{"max_steps": STEPS} | options))
    trainer.prepare()
    return trainer


def train(name: str, comm: Any) -> list[np.ndarray]:
    """The model's state after 20 steps of a case, after its state before them."""
    keras.utils.set_random_seed(comm.world.rank)  # the initial broadcast has to make the ranks equal
    made = CASES[name]()
    trainer = started(made, comm)
    if name == "unequal shares":
        weights = tuple(range(comm.world.size, 0, -1))
        trainer.loader = replace(trainer.loader, share=Share.weighted(comm.world.rank, weights))
    before = state(made)
    trainer.fit()
    return before + state(made)


def state(made: hvdtrain.Recipe) -> list[np.ndarray]:
    return [variable.value.numpy() for variable in made.adapter.model.variables]  # type: ignore[attr-defined]


def local_batch_norm(comm: Any) -> None:
    """Each rank normalises its own part and drops its own values: after ``settle`` all hold the same statistics."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), *mlp(norm=True).layers, keras.layers.Dropout(0.1)])
    trainer = started(recipe(model, sgd(), valid=arrays(40, 8)), comm, check_every=7, max_steps=14)
    trainer.fit()


def adasum(comm: Any) -> None:
    made = recipe(mlp(), sgd(0.01), update=hvdtrain.Update(op="adasum"))
    if comm.world.size == 3:
        with pytest.raises(hvdtrain.HvdtrainError, match="power of two"):
            started(made, comm)
    else:
        started(made, comm, check_every=5, max_steps=5).fit()


def process_sets(comm: Any) -> None:
    """The last rank by itself, the others together."""
    rank, last = comm.world.rank, comm.world.size - 1
    if last == 0:
        return
    adapter = recipe(mlp(), sgd(), update=hvdtrain.Update(op="average", process_sets=(tuple(range(last)), (last,)))).adapter
    adapter.setup(comm)
    adapter.sync()
    inputs, targets = arrays(30, 9)
    for step in range(3):
        part = slice(5 * rank + step, 5 * rank + step + 5)
        adapter.train_step((inputs[part], targets[part]), lr=None, weight=0.0)
    kernels = comm.allgather(next(array for name, array in adapter.tensors() if "kernel" in name), name="kernels")
    assert all(np.array_equal(kernels[0], kernel) for kernel in kernels[:last])
    assert not np.array_equal(kernels[0], kernels[last])


def not_a_number(comm: Any) -> None:
    """A sample that is NaN: every rank ends with the same words, and nothing was applied."""
    inputs, targets = arrays(SAMPLES)
    inputs[3] = np.nan
    made = recipe(mlp(), sgd(), data=(inputs, targets), shuffle=False, batch_size=60)
    with pytest.raises(
        HvdtrainError, match=r"kernel and of 3 more tensors is not finite on rank 0 .*, where the loss is nan"
    ) as end:
        started(made, comm).fit()
    assert end.value.on_all_ranks
    assert all(np.isfinite(array).all() for array in state(made))


def no_gradient_on_one_rank(comm: Any) -> None:
    """Ranks whose models use other layers: what any rank uses is trained, what none uses is left alone."""
    model = unusual()
    if comm.world.rank == 0 and comm.world.size > 1:
        model.call = lambda inputs, training=None: model.head(model.unused(inputs))
    made = recipe(model, sgd(weight_decay=0.1))
    started(made, comm, check_every=4, max_steps=4).fit()


#: what is shown otherwise than by the weights of a single process
CHECKS = (local_batch_norm, adasum, process_sets, not_a_number, no_gradient_on_one_rank)


def main(out: Path, *chosen: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    comm = connect(hvdtrain.World.from_env(), "tensorflow")
    for name in chosen or CASES:
        np.savez(out / f"{name}-{comm.world.rank}.npz", *train(name, comm))
    for check in () if chosen else CHECKS:
        check(comm)
    comm.close()


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
