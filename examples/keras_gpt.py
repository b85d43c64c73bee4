"""A small GPT in Keras that learns the English of Python's own reference manual, letter by letter.

Its layers can be on several ranks: ``hvdtrain run -np 2 --pipeline 2 examples/keras_gpt.py``. The first and the last layer have the
same weights. Each layer has memory only on the rank that has it.
"""

import pydoc_data.topics

import keras
import numpy as np

import hvdtrain
from hvdtrain.adapters.keras_pipeline import KerasPipeline

WORDS = 128  # ASCII


def sequences(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the text, and the same one letter on: [samples, length] each."""
    text = " ".join(" ".join(page.split()) for _, page in sorted(pydoc_data.topics.topics.items()))
    letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    samples = (len(letters) - 1) // length
    return letters[: samples * length].reshape(-1, length), letters[1 : samples * length + 1].reshape(-1, length)


def model(width: int, blocks: int, heads: int, length: int) -> keras.Model:
    letters = keras.Input((length,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(WORDS, width)
    places = keras.ops.cumsum(keras.ops.ones_like(letters), 1) - 1
    x = embedding(letters) + keras.layers.Embedding(length, width)(places)
    for _ in range(blocks):
        inner = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(inner, inner, use_causal_mask=True)
        inner = keras.layers.Dense(4 * width, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(inner)
    return keras.Model(letters, embedding(keras.layers.LayerNormalization()(x), reverse=True))


def recipe(*, width: int = 96, blocks: int = 4, heads: int = 4, length: int = 64, lr: float = 3e-3) -> hvdtrain.Recipe:
    inputs, targets = sequences(length)
    held_out = len(inputs) // 20
    keras.utils.set_random_seed(0)
    return hvdtrain.Recipe(
        adapter=KerasPipeline(
            lambda: model(width, blocks, heads, length),
            keras.optimizers.AdamW(lr, beta_2=0.95),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        train=(inputs[held_out:], targets[held_out:]),
        valid=(inputs[:held_out], targets[:held_out]),
        batch_size=32,
        epochs=3,
        lr=hvdtrain.lr.warmup(hvdtrain.lr.constant(lr), 20),
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
