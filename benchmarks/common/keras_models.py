"""The models in Keras 3 on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from . import tasks

layers = keras.layers


class DenseRows(layers.Layer):
    """An embedding whose gradient is dense, as PyTorch's is by default: the exchange of the whole table is what is measured.

    Keras' own layer gives the rows that were looked up; each side would send those alone.
    """

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(tasks.ROWS, tasks.ROW_WIDTH), name="table")

    def call(self, rows: Any) -> Any:
        return _looked_up(tf.convert_to_tensor(self.table), rows)


@tf.custom_gradient
def _looked_up(table: Any, rows: Any) -> Any:
    def gradient(upstream: Any) -> Any:
        flat = tf.reshape(upstream, (-1, tasks.ROW_WIDTH))
        return tf.math.unsorted_segment_sum(flat, tf.reshape(rows, (-1,)), tasks.ROWS), None

    return tf.gather(table, rows), gradient


def _tiny() -> Any:
    dense = [layers.Dense(tasks.HIDDEN, "relu"), layers.Dense(tasks.HIDDEN, "relu"), layers.Dense(tasks.CLASSES)]
    return keras.Sequential([keras.Input((tasks.FEATURES,)), *dense])


def _conv() -> Any:
    hidden: list[Any] = [keras.Input((tasks.PIXELS, tasks.PIXELS, 3))]
    for channels in tasks.CHANNELS:
        hidden += [layers.Conv2D(channels, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    return keras.Sequential([*hidden, layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(tasks.CLASSES)])


def transformer() -> Any:
    words = keras.Input((tasks.LENGTH,), dtype="int32")
    hidden = layers.Embedding(tasks.WORDS, tasks.WIDTH)(words)
    for _ in range(tasks.LAYERS):
        attention = layers.MultiHeadAttention(tasks.HEADS, tasks.WIDTH // tasks.HEADS)
        hidden = layers.LayerNormalization()(attention(hidden, hidden) + hidden)
        wide = layers.Dense(tasks.WIDTH)(layers.Dense(4 * tasks.WIDTH, "gelu")(hidden))
        hidden = layers.LayerNormalization()(wide + hidden)
    return keras.Model(words, layers.Dense(tasks.WORDS)(layers.GlobalAveragePooling1D()(hidden)))


def _embedding() -> Any:
    rows = keras.Input((tasks.LOOKED_UP,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(DenseRows()(rows))
    return keras.Model(rows, layers.Dense(tasks.CLASSES)(layers.Dense(tasks.HIDDEN, "relu")(hidden)))


def build(name: str) -> tuple[Any, Any, Any]:
    """The model of the task ``name``, its optimizer and its loss, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    model = {"tiny": _tiny, "conv": _conv, "transformer": transformer, "embedding": _embedding}[name]()
    small = name in ("tiny", "conv")
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9) if small else keras.optimizers.Adam(1e-4)
    return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
