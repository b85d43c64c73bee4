"""A recipe in which one rank goes wrong, the last one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hvdtrain
from tests.support.recipes import CLASSES, FEATURES, arrays


def model(framework: str, width: int = 8, order: tuple[str, ...] = ("first", "second"), dtype: str = "float32") -> Any:
    """A model of two layers, and its optimizer."""
    if framework == "torch":
        import torch

        layers = {"first": torch.nn.Linear(FEATURES, width), "second": torch.nn.Linear(width, CLASSES)}
        made = torch.nn.Module()
        for name in order:
            made.add_module(name, layers[name])
        made.forward = lambda inputs: made.second(torch.tanh(made.first(inputs)))  # type: ignore[method-assign]
        made.to(getattr(torch, dtype))
        return made, torch.optim.SGD(made.parameters(), 0.05)
    import keras

    names = iter(order)
    layers = [keras.layers.Dense(width, "tanh", name=next(names), dtype=dtype)]
    layers.append(keras.layers.Dense(CLASSES, name=next(names), dtype=dtype))
    return keras.Sequential([keras.Input((FEATURES,)), *layers]), keras.optimizers.SGD(0.05)


def adapter(framework: str, made: Any, **more: Any) -> Any:
    if framework == "torch":
        import torch

        from hvdtrain.adapters.torch import TorchAdapter

        return TorchAdapter(*made, loss=torch.nn.functional.cross_entropy, **more)
    import keras

    from hvdtrain.adapters.keras import KerasAdapter

    return KerasAdapter(*made, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **more)


class Spoiled:
    """A data set one of whose samples is no number from its 100th read on."""

    def __init__(self, data: tuple[np.ndarray, np.ndarray]) -> None:
        self.data, self.reads = data, 0

    def __len__(self) -> int:
        return len(self.data[0])

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = (array[indices] for array in self.data)
        self.reads += 1
        if self.reads > 3:
            inputs = inputs.copy()
            inputs[:1] = np.nan
        return inputs, targets


class DriftAt(hvdtrain.Callback):
    """Changes a weight on one rank only, after a step."""

    def __init__(self, change: Any, step: int) -> None:
        self.change, self.step = change, step

    def on_step_end(self, state: Any) -> None:
        if state.step == self.step:
            self.change()


def recipe(*, fault: str, framework: str) -> hvdtrain.Recipe:
    world = hvdtrain.World.from_env()
    odd = world.rank == world.size - 1
    data: Any = arrays(200)
    callbacks: tuple[hvdtrain.Callback, ...] = ()
    made = model(framework)
    if fault == "steps" and odd:
        data = arrays(190)
    elif fault == "shape" and odd:
        made = model(framework, width=9)
    elif fault == "order" and odd:
        made = model(framework, order=("second", "first"))
    elif fault == "dtype" and odd:
        made = model(framework, dtype="float64")
    elif fault == "nan" and odd:
        data = Spoiled(data)
    elif fault == "drift" and odd:
        callbacks = (DriftAt(lambda: _add_one(framework, made[0]), 5),)
    elif fault == "skip" and odd:
        return _recipe(skip_a_step(adapter(framework, made)), data, callbacks)
    return _recipe(adapter(framework, made), data, callbacks)


def _recipe(made: Any, data: Any, callbacks: Any) -> hvdtrain.Recipe:
    return hvdtrain.Recipe(adapter=made, train=data, batch_size=20, epochs=2, callbacks=callbacks)


def skip_a_step(made: Any) -> Any:
    """Make an adapter leave its fourth step out, and every reduction in it, for a long time."""
    step, steps = made.train_step, 0

    def train_step(batch: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            time.sleep(600)
        return step(batch, **more)

    made.train_step = train_step
    return made


def _add_one(framework: str, made: Any) -> None:
    if framework == "torch":
        import torch

        with torch.no_grad():
            made.second.bias.add_(1.0)
    else:
        made.layers[-1].bias.assign_add(np.ones(CLASSES))
