"""Handwritten digits with plain Keras, in one process: examples/keras_fit.py is the same on any number of ranks."""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
train_x, valid_x, train_y, valid_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.Adam(0.002),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
watchers = [keras.callbacks.EarlyStopping(patience=3), keras.callbacks.ModelCheckpoint("digits.keras")]
model.fit(
    x=train_x,
    y=train_y,
    batch_size=64,
    validation_data=(valid_x, valid_y),
    epochs=10,
    callbacks=watchers,
    verbose=2,
)
