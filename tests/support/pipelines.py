"""Recipes whose models can be on several ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import hvdtrain
from tests.support.recipes import CLASSES, FEATURES, arrays


def _recipe(adapter: Any) -> hvdtrain.Recipe:
    return hvdtrain.Recipe(adapter=adapter, train=arrays(307), valid=arrays(75, 2), batch_size=61, epochs=99, seed=5)


def _layers(*, dropout: float = 0.0) -> list[Any]:
    import torch
    from torch import nn

    torch.manual_seed(1)
    sizes = (FEATURES, 33, 21, 17, 13, 11, CLASSES)
    return [
        lambda inputs=inputs, outputs=outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(dropout))
        for inputs, outputs in pairwise(sizes)
    ]


def _torch(layers: list[Any], **more: Any) -> hvdtrain.Recipe:
    import torch
    import torch.nn.functional as F

    from hvdtrain.adapters.torch_pipeline import TorchPipeline

    def accuracy(output: Any, target: Any) -> Any:
        return (output.argmax(1) == target).float().mean()

    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    return _recipe(TorchPipeline(layers, adam, **{"loss": F.cross_entropy, "metrics": {"accuracy": accuracy}} | more))


def torch() -> hvdtrain.Recipe:
    return _torch(_layers())


def keras() -> hvdtrain.Recipe:
    import keras

    from hvdtrain.adapters.keras_pipeline import KerasPipeline

    def model() -> Any:
        layers = [keras.layers.Dense(size, "tanh") for size in (33, 21, 17, 13, 11)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES, "softmax")])

    keras.utils.set_random_seed(1)
    loss = "sparse_categorical_crossentropy"
    metrics = {"accuracy": keras.metrics.sparse_categorical_accuracy}
    return _recipe(KerasPipeline(model, keras.optimizers.Adam(0.01), loss=loss, metrics=metrics))


def dropout() -> hvdtrain.Recipe:
    return _torch(_layers(dropout=0.3))


def raises() -> hvdtrain.Recipe:
    """The second stage of two raises in its fourth step."""
    from torch import nn

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(CLASSES, CLASSES), 0

        def forward(self, x: Any) -> Any:
            self.calls += self.training
            if self.calls > 3 * 8:
                raise ValueError("no more")
            return self.inner(x)

    return _torch([*_layers(), Raises])


def infinite() -> hvdtrain.Recipe:
    from torch import nn

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Any) -> Any:
            return self.inner(x * 0).sub(self.inner.bias).sum(1, keepdim=True).sqrt() + x

    return _torch([*_layers(), Root])


class Lengths:
    """Sequences whose length is another one in each batch: 5, 9, 4, 7, ..."""

    LENGTHS = (5, 9, 4, 7)

    def __len__(self) -> int:
        return 307

    def take(self, indices: Any) -> Any:
        length = self.LENGTHS[int(indices[0]) % 4] if len(indices) else 3
        letters = np.stack([np.random.default_rng(int(i)).integers(0, 128, 10) for i in indices] or [np.zeros(10, int)])
        return letters[: len(indices), :length], letters[: len(indices), 1 : length + 1]
