"""Twenty steps of each feature in Keras: run on 1, 2 or 3 ranks, the weights must be those of one process.

``python -m tests.exactness.keras_cases OUT [NAME ...]`` runs them one after another, as one rank of whatever job it is in.
"""

from __future__ import annotations

import os
import sys
import tempfile
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
import hvdtrain.keras
from hvdtrain import lr
from hvdtrain.adapters.keras import KerasAdapter
from hvdtrain.config import Options
from hvdtrain.data.sampler import Share
from hvdtrain.errors import HvdtrainError
from hvdtrain.state import TrainState
from hvdtrain.trainer import Trainer
from tests.support import recipes
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


def changed_by_callbacks() -> hvdtrain.Recipe:
    """Weights are assigned between steps, and what the optimizer keeps (read, it is whole only after ``settle``)."""
    made = recipe(mlp(), keras.optimizers.Adam(0.004, epsilon=1e-4))
    adapter: Any = made.adapter
    kernel, momentum = adapter.model.trainable_variables[0], adapter.optimizer._momentums[1]
    actions = {5: lambda: kernel.assign(kernel * 0.5), 6: lambda: momentum.assign(momentum * 0.0)}
    return replace(made, callbacks=(AtStep(actions),))


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
    "scaled loss, regularisation": recipes.keras_unusual,
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
    "Adam, changed by callbacks": changed_by_callbacks,
}
#: these through Horovod too; all others travel through shared memory, except where the set-up says why not
THROUGH_HOROVOD = (
    "momentum, weight decay",
    "clip by global norm",
    "float16, overflow",
    "frozen layer, unfrozen later",
    "mean over tokens",
)
CASES |= {f"{name}, Horovod": CASES[name] for name in THROUGH_HOROVOD}


def fitted(model: Any, optimizer: Any, out: Path, *, batch_size: int = BATCH, **compiled: Any) -> list[np.ndarray]:
    """The model after ``fit`` as users call it, and the figures of its epochs, after its state before."""
    inputs, targets = arrays(SAMPLES)
    weights = np.random.default_rng(2).random(SAMPLES).astype(np.float32)
    fit = {"class_weight": compiled.pop("class_weight", None), "epochs": 1 if batch_size == 2 else 4}
    model.compile(hvdtrain.keras.distribute(optimizer), **{"loss": CROSS_ENTROPY, "weighted_metrics": ["accuracy"]} | compiled)
    before = values(model)
    rounded = np.zeros(fit["epochs"], np.float32)
    data = (inputs, targets) if fit["class_weight"] else (inputs, targets, weights)
    history = model.fit(
        hvdtrain.keras.shard(*data, batch_size=batch_size) if batch_size != 7 else batched(data),
        validation_data=arrays(40, 8) if batch_size == 7 else hvdtrain.keras.shard(*arrays(40, 8), batch_size=33),
        callbacks=hvdtrain.keras.callbacks(
            keras.callbacks.ModelCheckpoint(str(out / "{epoch}.keras")),
            keras.callbacks.EarlyStopping(patience=9, monitor="loss"),
        ),
        verbose=2,
        **fit,
    )
    figures = [np.array(history.history[name], np.float32) for name in sorted(history.history)]
    return [*before, *([rounded] * len(figures)), *values(model), *figures]


def batched(data: Any) -> Any:
    """Batches as users make them, and sharded once."""
    tf.random.set_seed(0)
    once = hvdtrain.keras.shard(tf.data.Dataset.from_tensor_slices(data).shuffle(SAMPLES, seed=1).batch(60))
    return hvdtrain.keras.shard(once)


class OwnStep(keras.Model):
    """A subclass with a training step, a loss and figures of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean = mlp(), keras.metrics.Mean("own")

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, targets, _ = data
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(targets, self(inputs, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.update_state(loss, tf.shape(inputs)[0])
        return {"own": self.mean.result()}


def two_outputs() -> Any:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(9, activation="tanh", kernel_regularizer="l2")(inputs)
    heads = [keras.layers.Dense(CLASSES, name="one")(hidden), keras.layers.Dense(CLASSES, name="two")(hidden)]
    return keras.Model(inputs, heads[0] + 2 * heads[1])


def half() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return mlp()
    finally:
        keras.config.set_dtype_policy("float32")


def accumulated() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.1)


def own_step() -> Any:
    model = OwnStep()
    model.build((None, FEATURES))
    return model


#: feature -> model, optimizer, how it is compiled
FITS: dict[str, Callable[[Path], list[np.ndarray]]] = {
    "fit": lambda out: fitted(mlp(), sgd(), out),
    "fit, class weights": lambda out: fitted(
        mlp(),
        keras.optimizers.Adam(0.004, epsilon=1e-4),
        out,
        class_weight={0: 2.0, 1: 0.3} | dict.fromkeys(range(2, CLASSES), 1.0),
    ),
    "fit, accumulation, clipped": lambda out: fitted(mlp(), accumulated(), out),
    "fit, float16, several steps at once": lambda out: fitted(
        half(), keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10), out, steps_per_execution=4
    ),
    "fit, own training step, batches of 2": lambda out: fitted(own_step(), sgd(0.01), out, batch_size=2, weighted_metrics=None),
    "fit, synchronised batch norm": lambda out: fitted(mlp(norm=True, synchronized=True), sgd(), out, batch_size=60),
    "fit, tf.data": lambda out: fitted(
        two_outputs(), sgd(), out, batch_size=7, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
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
    trainer = started(made, comm, exchange="horovod" if name.endswith(", Horovod") else "auto")
    if name == "unequal shares":
        weights = tuple(range(comm.world.size, 0, -1))
        trainer.place = trainer.place.with_share(Share.weighted(comm.world.rank, weights))
    before = everything(made) if name.startswith("Adam") else state(made)
    trainer.fit()
    made.adapter.settle()
    return before + (everything(made) if name.startswith("Adam") else state(made))


COMPRESSED = "momentum, weight decay"
COMPRESSIONS = ("bfloat16", "float16", "topk:0.1", "powersgd:2")


def compressed(compression: str, comm: Any) -> list[np.ndarray]:
    """A case with gradients that travel compressed; what is owed goes into a checkpoint and comes back from it."""
    keras.utils.set_random_seed(comm.world.rank)
    made = CASES[COMPRESSED]()
    adapter: Any = made.adapter
    trainer = started(made, comm, compression=compression, bucket_mb=0.001)  # two buckets
    before = state(made)
    trainer.fit()
    after = state(made)
    adapter.settle(saving=True)
    owed = adapter._exchange.state()
    assert bool(owed) == (compression != "bfloat16"), owed.keys()
    with tempfile.TemporaryDirectory() as folder:
        adapter.snapshot()(Path(folder))
        adapter.load(Path(folder))
    back = adapter._exchange.state()
    assert back.keys() == owed.keys()
    assert all(np.array_equal(back[key], owed[key]) for key in owed)
    adapter.sync()
    shared = comm.allgather(sorted(adapter._exchange.state()), name="what is remembered")
    assert all(names == sorted(owed) for names in shared)
    return before + after


def state(made: hvdtrain.Recipe) -> list[np.ndarray]:
    return values(made.adapter.model)  # type: ignore[attr-defined]


def everything(made: hvdtrain.Recipe) -> list[np.ndarray]:
    """With what the optimizer keeps of each variable."""
    optimizer: Any = made.adapter.optimizer  # type: ignore[attr-defined]
    return state(made) + [each.value.numpy() for slot in (optimizer._momentums, optimizer._velocities) for each in slot]


def values(model: Any) -> list[np.ndarray]:
    return [variable.value.numpy() for variable in model.variables]


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
    update = hvdtrain.Update(op="average", process_sets=(tuple(range(last)), (last,)))
    adapter = KerasAdapter(mlp(), sgd(), loss=CROSS_ENTROPY, update=update)
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


def not_a_number_in_fit(comm: Any) -> None:
    """The same in a user's own ``fit``, whose error Keras wraps."""
    inputs, targets = arrays(60)
    inputs[59] = np.nan  # the last rank's
    model = mlp()
    model.compile(hvdtrain.keras.distribute(sgd()), loss=CROSS_ENTROPY)
    data = hvdtrain.keras.shard(inputs, targets, batch_size=60, shuffle=False)
    if comm.world.size > 1:
        with pytest.raises(
            tf.errors.OpError, match=f"kernel and of 3 more tensors is not finite on rank {comm.world.size - 1} "
        ):
            model.fit(data, verbose=0, callbacks=hvdtrain.keras.callbacks())
        assert all(np.isfinite(array).all() for array in values(model))


def no_gradient_on_one_rank(comm: Any) -> None:
    """Ranks whose models use other layers: what any rank uses is trained, what none uses is left alone."""
    model = unusual()
    if comm.world.rank == 0 and comm.world.size > 1:
        model.call = lambda inputs, training=None: model.head(model.unused(inputs))
    made = recipe(model, sgd(weight_decay=0.1))
    started(made, comm, check_every=4, max_steps=4).fit()


def uneven_fits(comm: Any) -> None:
    """Ranks that do not know how many batches they have; and ranks that have more or fewer."""
    rank = comm.world.rank
    if comm.world.size == 1:
        return
    inputs, targets = arrays(40)

    def batches() -> Any:
        for start in range(0, 24 + 8 * (rank == 1), 8):
            yield inputs[start : start + 8] + rank, targets[start : start + 8]

    specs = tf.TensorSpec((None, FEATURES), tf.float32), tf.TensorSpec((None,), tf.int64)
    known = tf.data.Dataset.from_tensor_slices((inputs[: 24 + 8 * (rank == 1)], targets[: 24 + 8 * (rank == 1)])).batch(8)
    for data, words in (
        (
            tf.data.Dataset.from_generator(batches, output_signature=specs),
            "the number of batches of the training data is not known",
        ),
        (known, "rank 1 on .* has 4 batches an epoch, rank 0 has 3"),
    ):
        model = mlp()
        model.compile(hvdtrain.keras.distribute(sgd()), loss=CROSS_ENTROPY)
        with pytest.raises(HvdtrainError, match=words) as end:
            model.fit(data, epochs=1, verbose=0, callbacks=hvdtrain.keras.callbacks())
        assert end.value.on_all_ranks


def a_loaded_model_goes_on(comm: Any) -> None:
    """Its optimizer is plain: the callbacks distribute it, also one that Keras itself wrapped for float16."""
    model = half()
    model.compile("sgd", loss=CROSS_ENTROPY, jit_compile=False)
    data = hvdtrain.keras.shard(*arrays(40), batch_size=8)
    model.fit(data, verbose=0, callbacks=hvdtrain.keras.callbacks())
    kernels = comm.allgather(values(model)[0], name="kernels")
    assert all(np.array_equal(kernel, kernels[0]) for kernel in kernels)
    model.compile("sgd", loss=CROSS_ENTROPY, jit_compile=True)
    if comm.world.size > 1:
        with pytest.raises(HvdtrainError, match="do not run inside XLA"):
            model.fit(data, verbose=0, callbacks=hvdtrain.keras.callbacks())


#: what is shown otherwise than by the weights of a single process
CHECKS = (
    local_batch_norm,
    adasum,
    process_sets,
    not_a_number,
    not_a_number_in_fit,
    no_gradient_on_one_rank,
    uneven_fits,
    a_loaded_model_goes_on,
)


def main(out: Path, *chosen: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    comm = hvdtrain.keras._comm()
    for name in [name for name in [*CASES, *FITS] if not chosen or name in chosen]:
        if name in CASES:
            arrays = train(name, comm)
        else:
            keras.utils.set_random_seed(comm.world.rank)
            arrays = FITS[name](out)
        np.savez(out / f"{name}-{comm.world.rank}.npz", *arrays)
    for name in COMPRESSIONS if comm.world.size > 1 else ():
        if not chosen or name in chosen:
            np.savez(out / f"{COMPRESSED} ({name})-{comm.world.rank}.npz", *compressed(name, comm))
    for check in CHECKS:
        if not chosen or check.__name__ in chosen:
            check(comm)
    comm.close()


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
