"""Models as graphs of layers, in Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdtrain
from hvdtrain.adapters.keras_pipeline import KerasPipeline
from tests.support.pipelines import Lengths
from tests.support.recipes import CLASSES, FEATURES, arrays

BATCH, SAMPLES = 61, 307  # every sixth batch is a tail of 2, so that most micro-batches of it are missing
CROSS_ENTROPY = "sparse_categorical_crossentropy"


def recipe(make: Any, optimizer: Any = None, *, data: Any = None, loss: Any = None, **more: Any) -> hvdtrain.Recipe:
    keras.utils.set_random_seed(1)
    adapter = KerasPipeline(make, optimizer or sgd(), loss=loss or from_logits(), update=more.pop("update", hvdtrain.Update()))
    return hvdtrain.Recipe(
        **{"adapter": adapter, "train": data or arrays(SAMPLES), "batch_size": BATCH, "epochs": 99, "seed": 5} | more
    )


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def from_logits(**more: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **more)


def sequential() -> Any:
    sizes = (33, 21, 17, 13, 11)
    layers = [keras.layers.Dense(size, "tanh") for size in sizes]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


def mlp() -> hvdtrain.Recipe:
    return recipe(sequential)


def clipped() -> hvdtrain.Recipe:
    return recipe(sequential, keras.optimizers.AdamW(0.004, weight_decay=0.1), update=hvdtrain.Update(clip_norm=0.05))


def clipped_value() -> hvdtrain.Recipe:
    return recipe(sequential, update=hvdtrain.Update(clip_value=0.002))


def skips() -> hvdtrain.Recipe:
    """Several tensors cross each cut."""

    def make() -> Any:
        inputs = keras.Input((FEATURES,))
        first = keras.layers.Dense(12, "tanh")(inputs)
        second = keras.layers.Dense(12, "tanh")(first)
        third = keras.layers.Dense(12, "tanh")(keras.layers.Add()([first, second]))
        fourth = keras.layers.Dense(12, "tanh")(keras.layers.Concatenate()([third, first]))
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Concatenate()([fourth, inputs])))

    return recipe(make)


def regularised() -> hvdtrain.Recipe:
    """Each stage adds to the loss."""

    def make() -> Any:
        sizes = (33, 21, 17, 13, 11, CLASSES)
        layers = [keras.layers.Dense(size, kernel_regularizer=keras.regularizers.L2(0.01)) for size in sizes]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    return recipe(make)


def transformer() -> Any:
    """The first and the last layer have the same weights."""
    letters = keras.Input((None,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(128, 16)
    x = embedding(letters)
    for _ in range(2):
        inner = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(2, 8, use_bias=False)
        x = keras.layers.Add()([x, attention(inner, inner, use_causal_mask=True)])
        inner = keras.layers.Dense(32, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(16)(inner)])
    return keras.Model(letters, embedding(x, reverse=True))


def gpt() -> hvdtrain.Recipe:
    letters = np.random.default_rng(0).integers(0, 128, (SAMPLES, 10)).astype(np.int32)
    return recipe(transformer, data=(letters[:, :-1], letters[:, 1:]))


def lengths() -> hvdtrain.Recipe:
    return recipe(transformer, data=Lengths())


def masked() -> hvdtrain.Recipe:
    """The loss is a mean over the letters that are no padding, of which there is another number in each micro-batch."""
    letters = np.random.default_rng(1).integers(0, 128, (SAMPLES, 10)).astype(np.int32)
    targets = np.where(np.arange(9) < np.random.default_rng(2).integers(1, 10, (SAMPLES, 1)), letters[:, 1:], -100)

    def loss(target: Any, output: Any) -> Any:
        real = keras.ops.cast(target != -100, "float32")
        values = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(target, 0), output, from_logits=True)
        return keras.ops.sum(values * real) / keras.ops.maximum(keras.ops.sum(real), 1.0)

    def count(target: Any) -> Any:
        return keras.ops.sum(keras.ops.cast(target != -100, "float32"))

    return recipe(transformer, data=(letters[:, :-1], targets), loss=loss, update=hvdtrain.Update(count=count))


def resnet() -> hvdtrain.Recipe:
    images = np.random.default_rng(3).standard_normal((SAMPLES, 8, 8, 1)).astype(np.float32)

    def make() -> Any:
        inputs = keras.Input((8, 8, 1))
        x = keras.layers.Conv2D(8, 3)(inputs)
        for channels, stride in ((8, 1), (16, 2)):
            inner = keras.layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
            inner = keras.layers.ReLU()(keras.layers.GroupNormalization(4)(inner))
            inner = keras.layers.Conv2D(channels, 3, padding="same", use_bias=False)(inner)
            shortcut = x if stride == 1 else keras.layers.Conv2D(channels, 1, stride, use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.Add()([inner, shortcut]))
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(x)))

    return recipe(make, data=(images, arrays(SAMPLES)[1]))


CASES = {
    "mlp": mlp,
    "clipped by norm": clipped,
    "clipped by value": clipped_value,
    "skips": skips,
    "regularised": regularised,
    "gpt": gpt,
    "lengths": lengths,
    "masked": masked,
    "resnet": resnet,
}
