"""Handwritten digits with softmax regression in NumPy: no framework, no Horovod needed."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
from hvdtrain.adapters.linear import LinearAdapter


def recipe(*, lr: float = 0.5) -> hvdtrain.Recipe:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train_x, valid_x, train_y, valid_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return hvdtrain.Recipe(
        adapter=LinearAdapter(features=64, classes=10, momentum=0.9),
        train=(train_x, train_y),
        valid=(valid_x, valid_y),
        batch_size=64,
        epochs=10,
        lr=lr,
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
