"""What asynchronous checkpoints add to the step time: a transformer of 13 million parameters with Adam, saved every 20 steps.

One process per framework. Stretches of 20 steps with a checkpoint and without one take turns, so that both meet the same machine;
a stretch is long enough for its checkpoint (156 MB) to be written within it, which is checked. What is compared is the sum of each
step's median over the stretches, so that a burst of another program's counts little.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from common.tasks import LENGTH, WORDS
from rich.console import Console
from rich.table import Table

STEPS, PAIRS, BATCH = 20, 3, 32
BOUND = 1.03


def torch_adapter():
    from common import torch_models

    from hvdtrain.adapters.torch import TorchAdapter

    return TorchAdapter(*torch_models.build("transformer"), loss=torch_models.loss)


def keras_adapter():
    from common import keras_models

    from hvdtrain.adapters.keras import KerasAdapter

    model, optimizer, loss = keras_models.build("transformer")
    return KerasAdapter(model, optimizer, loss=loss)


SIDES = {"PyTorch": torch_adapter, "Keras": keras_adapter}


def child(side: str) -> None:
    from hvdtrain.checkpoint.files import Content, latest, size_of
    from hvdtrain.checkpoint.writer import Saver
    from hvdtrain.comm.local import LocalCommunicator
    from hvdtrain.state import TrainState
    from hvdtrain.world import World

    comm, adapter, random = LocalCommunicator(World()), SIDES[side](), np.random.default_rng(0)
    adapter.setup(comm)
    batch = (random.integers(0, WORDS, (BATCH, LENGTH)), random.integers(0, WORDS, BATCH))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        saver = Saver(Path(folder), adapter, comm, keep=2)
        copies = []

        def stretch(number: int, *, save: bool) -> list[float]:
            """Seconds of each step; the first one's with the copy."""
            laps = [time.perf_counter()]
            if save:
                saver.save(lambda: Content(TrainState(step=number), {}))
                copies.append(time.perf_counter() - laps[0])
            for _ in range(STEPS):
                float(adapter.train_step(batch, lr=None, weight=1.0)["loss"].value)
                laps.append(time.perf_counter())
            saver.wait()
            if time.perf_counter() - laps[-1] > 0.05:
                sys.exit(f"a checkpoint takes longer than the {STEPS} steps after it")
            return [after - before for before, after in pairwise(laps)]

        stretch(1, save=True)  # tracing, first allocations
        times: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(2, 2 + PAIRS):
            for save in (True, False) if number % 2 else (False, True):
                times[save].append(stretch(number, save=save))
        size = size_of(latest(Path(folder)).path)
    saving, plain = (sum(map(statistics.median, zip(*times[save], strict=True))) for save in (True, False))
    figures = {"ratio": saving / plain, "step": plain / STEPS, "copy": statistics.median(copies[1:]), "bytes": size}
    print(json.dumps(figures))


def main() -> int:
    table = Table(
        "framework",
        "step (ms)",
        "copy (ms)",
        "checkpoint (MB)",
        "time with / without",
        title=f"{STEPS} steps, median of {PAIRS}",
    )
    worst = 0.0
    for side in SIDES:
        command = [sys.executable, __file__, side]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        found = json.loads(lines[-1])
        worst = max(worst, found["ratio"])
        numbers = found["step"] * 1e3, found["copy"] * 1e3, found["bytes"] / 1e6
        table.add_row(side, *(f"{number:.0f}" for number in numbers), f"{found['ratio']:.3f}")
    Console().print(table)
    print(f"asked for: at most {BOUND}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        sys.exit(main())
