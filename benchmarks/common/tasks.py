"""What is trained: sizes of the models, and data for them. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
#: the multilayer perceptron: inputs and hidden units
FEATURES, HIDDEN = 64, 128
#: the convolutional network: pixels on each side, and channels
PIXELS, CHANNELS = 32, (32, 64, 128)
#: the transformer: 13.0 million parameters
WORDS, WIDTH, LAYERS, HEADS, LENGTH = 3000, 384, 6, 6, 64
#: the embedding model: 48.0 million parameters, and the rows that one sample looks up
ROWS, ROW_WIDTH, LOOKED_UP = 750_000, 64, 16

#: Steps of a round: as many as between two of hvdtrain's log lines, so that each round pays for one.
ROUND = 10


@dataclass(frozen=True)
class Task:
    """A model, and how long it is measured.

    Attributes:
        batch: samples of one step on each rank.
        samples: of the whole data set, in memory.
        warm_up: rounds that are not counted: tracing, connections, first allocations.
        rounds: rounds of one run that are counted.
    """

    name: str
    title: str
    batch: int
    samples: int
    warm_up: int
    rounds: int

    @property
    def steps(self) -> int:
        return (self.warm_up + self.rounds) * ROUND


TASKS = {
    task.name: task
    for task in (
        Task("tiny", "tiny MLP", batch=256, samples=131_072, warm_up=30, rounds=150),
        Task("conv", "convolutional network", batch=64, samples=8192, warm_up=1, rounds=5),
        Task("transformer", "13-million transformer", batch=4, samples=4096, warm_up=1, rounds=3),
        Task("embedding", "48-million embedding model", batch=64, samples=65_536, warm_up=1, rounds=1),
    )
}


def data(task: Task, *, channels_first: bool) -> tuple[Any, Any]:
    """(inputs, targets) of all samples, the same in every process. Inputs that count something are int32."""
    random = np.random.default_rng(0)
    targets = random.integers(0, WORDS if task.name == "transformer" else CLASSES, task.samples)
    if task.name == "tiny":
        return random.standard_normal((task.samples, FEATURES), dtype=np.float32), targets
    if task.name == "conv":
        shape = (3, PIXELS, PIXELS) if channels_first else (PIXELS, PIXELS, 3)
        return random.standard_normal((task.samples, *shape), dtype=np.float32), targets
    limit, length = (WORDS, LENGTH) if task.name == "transformer" else (ROWS, LOOKED_UP)
    return random.integers(0, limit, (task.samples, length), dtype=np.int32), targets


def batches(task: Task, rank: int, *, channels_first: bool, limit: int = 64) -> list[tuple[Any, Any]]:
    """The first ``limit`` batches of ``rank``: other samples than those of the other ranks."""
    inputs, targets = data(task, channels_first=channels_first)
    starts = range(rank * task.batch, task.samples - task.batch + 1, 2 * task.batch)
    return [(inputs[start : start + task.batch], targets[start : start + task.batch]) for start in starts[:limit]]
