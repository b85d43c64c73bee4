"""Small recipes for tests: 1,003 samples and batches of 64, so nothing divides anything.

Each takes ``out``: a directory where every rank writes the samples of each of its batches and, at the end, its weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.data.sources import ArraySource
from hvdtrain.state import TrainState

SAMPLES, FEATURES, CLASSES = 1003, 12, 5


def arrays(count: int = SAMPLES, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(count, FEATURES)).astype(np.float32)
    truth = np.random.default_rng(1).normal(size=(FEATURES, CLASSES))
    return inputs, (inputs @ truth + random.normal(size=(count, CLASSES))).argmax(1).astype(np.int64)


class Recorder(hvdtrain.Callback):
    """Writes what a rank did: ``rank-N.json`` (the indices of each of its batches) and ``rank-N.npz`` (its weights)."""

    def __init__(self, out: str, weights: Callable[[], list[np.ndarray]], source: RecordedSource) -> None:
        self.out, self.weights, self.source = Path(out), weights, source

    def on_end(self, state: TrainState) -> None:
        rank = hvdtrain.World.from_env().rank
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"rank-{rank}.json").write_text(json.dumps(self.source.taken))
        np.savez(self.out / f"rank-{rank}.npz", *self.weights())


class RecordedSource:
    def __init__(self, data: tuple[np.ndarray, np.ndarray]) -> None:
        self.source = ArraySource(data)
        self.taken: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.taken.append(indices.tolist())
        return self.source.take(indices)


class KilledAt(hvdtrain.Callback):
    """The last rank gets SIGKILL after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: TrainState) -> None:
        world = hvdtrain.World.from_env()
        if state.step == self.step and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _recipe(adapter, weights, out: str, samples: int, kill: int = 0, **more) -> hvdtrain.Recipe:
    source = RecordedSource(arrays(samples))
    callbacks: tuple[hvdtrain.Callback, ...] = (Recorder(out, weights, source),) if out else ()
    callbacks += (KilledAt(kill),) if kill else ()
    return hvdtrain.Recipe(
        adapter=adapter, train=source, valid=arrays(101, 8), batch_size=64, epochs=2, seed=5, callbacks=callbacks, **more
    )


def linear(*, out: str = "", samples: int = SAMPLES, kill: int = 0) -> hvdtrain.Recipe:
    from hvdtrain.adapters.linear import LinearAdapter

    adapter = LinearAdapter(FEATURES, CLASSES)
    return _recipe(adapter, lambda: [adapter.weights], out, samples, kill)


def torch(*, out: str = "", samples: int = SAMPLES, kill: int = 0) -> hvdtrain.Recipe:
    import torch
    import torch.nn.functional as F

    from hvdtrain.adapters.torch import TorchAdapter

    # Each rank begins elsewhere: the initial broadcast has to make them equal.
    torch.manual_seed(hvdtrain.World.from_env().rank)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 33), torch.nn.Tanh(), torch.nn.Linear(33, CLASSES))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.002}, {"params": model[2].parameters()}], lr=0.004, weight_decay=0.01
    )

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float().mean()

    adapter = TorchAdapter(model, optimizer, loss=F.cross_entropy, metrics={"accuracy": accuracy})
    return _recipe(adapter, lambda: [p.detach().numpy() for p in model.parameters()], out, samples, kill)


def keras(*, out: str = "", samples: int = SAMPLES, kill: int = 0) -> hvdtrain.Recipe:
    import keras

    from hvdtrain.adapters.keras import KerasAdapter

    keras.utils.set_random_seed(hvdtrain.World.from_env().rank)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(33, activation="tanh"), keras.layers.Dense(CLASSES)])
    adapter = KerasAdapter(
        model,
        keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics={"accuracy": keras.metrics.sparse_categorical_accuracy},
    )
    return _recipe(
        adapter,
        lambda: [v.value.numpy() for v in model.trainable_variables],
        out,
        samples,
        kill,
        lr=lambda step: 0.05 / (1 + step / 50),
    )


def torch_unusual(*, out: str = "", samples: int = SAMPLES) -> hvdtrain.Recipe:
    """An unused head, a frozen layer that is unfrozen on the way, channels-last convolutions, a sparse embedding, tied weights."""
    import torch
    import torch.nn.functional as F

    from hvdtrain.adapters.torch import TorchAdapter

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(FEATURES, 4, sparse=True)
            self.conv = torch.nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.mix = torch.nn.Linear(FEATURES * 4, FEATURES * 4)
            self.again = torch.nn.Linear(FEATURES * 4, FEATURES * 4)
            self.again.weight = self.mix.weight
            self.head = torch.nn.Linear(FEATURES * 4, CLASSES)
            self.unused = torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            words = self.words(torch.arange(FEATURES)) * inputs[:, :, None]
            image = words.transpose(1, 2).reshape(-1, 4, 3, 4).to(memory_format=torch.channels_last)
            hidden = torch.tanh(self.again(torch.tanh(self.mix(self.conv(image).flatten(1)))))
            return self.head(hidden)

    torch.manual_seed(0)
    model = Model()
    model.conv.requires_grad_(False)

    class Unfreeze(hvdtrain.Callback):
        def on_step_end(self, state: TrainState) -> None:
            model.conv.requires_grad_(state.step >= 5)

    dense = [parameter for name, parameter in model.named_parameters() if name != "words.weight"]
    optimizer = torch.optim.SGD(
        [{"params": dense, "weight_decay": 0.1, "momentum": 0.9}, {"params": [model.words.weight]}], lr=0.02
    )
    recipe = _recipe(
        TorchAdapter(model, optimizer, loss=F.cross_entropy),
        lambda: [p.detach().numpy() for p in model.parameters()],
        out,
        samples,
    )
    return dataclasses.replace(recipe, callbacks=(*recipe.callbacks, Unfreeze()))


def keras_unusual(*, out: str = "", samples: int = SAMPLES) -> hvdtrain.Recipe:
    """A scaled loss, regularisation, a frozen layer, an unused one, a loss given by name, tied weights."""
    import keras

    from hvdtrain.adapters.keras import KerasAdapter

    class Model(keras.Model):
        def __init__(self, width: int) -> None:  # without get_config, as people write them
            super().__init__()
            self.frozen = keras.layers.Dense(width, trainable=False)
            self.tied = keras.layers.Dense(width, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
            self.unused = keras.layers.Dense(width)
            self.head = keras.layers.Dense(CLASSES, activation="softmax")

        def build(self, shape: tuple[int, ...]) -> None:
            self.frozen.build(shape)
            self.tied.build((None, FEATURES))
            self.unused.build((None, FEATURES))
            self.head.build((None, FEATURES))
            self.built = True

        def call(self, inputs):
            return self.head(self.tied(self.tied(self.frozen(inputs))))

    keras.utils.set_random_seed(0)
    model = Model(FEATURES)
    model.build((None, FEATURES))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=1024.0)
    adapter = KerasAdapter(model, optimizer, loss="sparse_categorical_crossentropy")
    return _recipe(adapter, lambda: [variable.value.numpy() for variable in model.variables], out, samples)
