"""What a rank trains in ``benchmarks/network.py``: the transformer, and what went over the network in each step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from common import recipes
from hvdtrain import Callback, Recipe
from hvdtrain.state import TrainState
from hvdtrain.world import World

DEVICE = "eth0"
#: Samples of a step on each rank: few, so that the computation is short beside the network.
BATCH = 1


class Sent(Callback):
    """Writes the bytes that this host had sent after each step, frames and all, to ``folder`` at the end."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / f"sent-{World.from_env().rank}.json"
        self._counter = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
        self._counts: list[int] = []

    def on_step_end(self, state: TrainState) -> None:
        self._counts.append(int(self._counter.read_text()))

    def on_end(self, state: TrainState) -> None:
        self._path.write_text(json.dumps(self._counts))


def transformer(*, folder: str) -> Recipe:
    recipe = recipes.torch(task="transformer", folder=folder)
    return replace(recipe, batch_size=BATCH, callbacks=(*recipe.callbacks, Sent(folder)))
