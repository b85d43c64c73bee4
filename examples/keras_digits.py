"""Handwritten digits with a small convolutional network in Keras 3 on TensorFlow."""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
from hvdtrain.adapters.keras import KerasAdapter


def recipe(*, channels: int = 16, lr: float = 0.05) -> hvdtrain.Recipe:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, valid_x, train_y, valid_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(channels, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    return hvdtrain.Recipe(
        adapter=KerasAdapter(
            model,
            keras.optimizers.SGD(lr, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics={"accuracy": keras.metrics.sparse_categorical_accuracy},
        ),
        train=(train_x, train_y),
        valid=(valid_x, valid_y),
        batch_size=64,
        epochs=15,
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
