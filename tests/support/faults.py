"""Recipes in which one rank goes wrong, the last one: before or in a step, while it loads, in the user's own code."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from tests.support.recipes import CLASSES, FEATURES, arrays


def model(framework: str, width: int = 8, order: tuple[str, ...] = ("first", "second")) -> Any:
    """A model of two layers, and its optimizer."""
    if framework == "torch":
        import torch

        layers = {"first": torch.nn.Linear(FEATURES, width), "second": torch.nn.Linear(width, CLASSES)}
        made = torch.nn.Module()
        for name in order:
            made.add_module(name, layers[name])
        made.forward = lambda inputs: made.second(torch.tanh(made.first(inputs)))  # type: ignore[method-assign]
        return made, torch.optim.SGD(made.parameters(), 0.05)
    import keras

    names = iter(order)
    layers = [keras.layers.Dense(width, "tanh", name=next(names))]
    layers.append(keras.layers.Dense(CLASSES, name=next(names)))
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
    elif fault == "nan" and odd:
        data = Spoiled(data)
    elif fault == "drift" and odd:
        callbacks = (DriftAt(lambda: _add_one(framework, made[0]), 5),)
    elif fault == "skip" and odd:
        return _recipe(skip_a_step(adapter(framework, made)), data, callbacks)
    return _recipe(adapter(framework, made), data, callbacks)


def _recipe(made: Any, data: Any, callbacks: Any) -> hvdtrain.Recipe:
    return hvdtrain.Recipe(adapter=made, train=data, batch_size=20, epochs=2, callbacks=callbacks)


def skip_a_step(made: Any, number: int = 4) -> Any:
    """Make an adapter leave one of its steps out, and every reduction in it, for a long time."""
    step, steps = made.train_step, 0

    def train_step(batch: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
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


class Steps(hvdtrain.Callback):
    """Takes its time for each step; leaves this rank's process number, and on the primary the steps that were done."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.seconds = out, seconds
        self.rank = hvdtrain.World.from_env().rank

    def on_start(self, state: Any) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"pid-{self.rank}").write_text(str(os.getpid()))

    def on_step_end(self, state: Any) -> None:
        time.sleep(self.seconds)
        if self.rank == 0:
            with (self.out / "steps").open("a") as steps:
                steps.write(f"{state.step}\n")


class Raises(hvdtrain.Callback):
    """The user's own code fails after a step, on one rank."""

    def on_step_end(self, state: Any) -> None:
        if state.step == 12:
            raise KeyError("mine")


class Breaks:
    """A data set that fails, or does not come back, at the 13th batch."""

    def __init__(self, data: tuple[np.ndarray, np.ndarray], how: str) -> None:
        self.data, self.how, self.reads = data, how, 0

    def __len__(self) -> int:
        return len(self.data[0])

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.reads += 1
        if self.reads > 12:
            if self.how == "loader":
                raise OSError("a bad disk")
            while True:
                sum(range(1000))
        inputs, targets = self.data
        return inputs[indices], targets[indices]


def long(*, fault: str = "", framework: str = "numpy", out: str, seconds: float = 0.05) -> hvdtrain.Recipe:
    """60 steps of 20 samples. ``fault``: skip, loop or loader, on the last rank; callback there, or primary on rank 0."""
    world = hvdtrain.World.from_env()
    odd = world.rank == world.size - 1
    data: Any = arrays(400)
    if framework == "numpy":
        from hvdtrain.adapters.linear import LinearAdapter

        made: Any = LinearAdapter(FEATURES, CLASSES)
    else:
        made = adapter(framework, model(framework))
    callbacks: tuple[hvdtrain.Callback, ...] = (Steps(Path(out), seconds),)
    if fault in ("loop", "loader") and odd:
        data = Breaks(data, fault)
    if (fault == "callback" and odd) or (fault == "primary" and world.rank == 0):
        callbacks += (Raises(),)
    if fault == "skip" and odd:
        made = skip_a_step(made, 13)
    return hvdtrain.Recipe(adapter=made, train=data, batch_size=20, epochs=3, callbacks=callbacks)
