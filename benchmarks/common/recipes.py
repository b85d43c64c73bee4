"""hvdtrain's side: the same models as recipes, which note the time after each step."""

from __future__ import annotations

from pathlib import Path

from common import tasks
from common.laps import Laps
from common.tasks import TASKS
from hvdtrain import Callback, Recipe
from hvdtrain.state import TrainState
from hvdtrain.world import World


class Times(Callback):
    """Writes the times to ``folder`` at the end."""

    def __init__(self, folder: str) -> None:
        self._laps = Laps(Path(folder), World.from_env().rank)

    def on_step_end(self, state: TrainState) -> None:
        self._laps.lap()

    def on_end(self, state: TrainState) -> None:
        self._laps.write()


def torch(*, task: str, folder: str) -> Recipe:
    from common import torch_models
    from hvdtrain.adapters.torch import TorchAdapter

    model, optimizer = torch_models.build(task)
    adapter = TorchAdapter(model, optimizer, loss=torch_models.loss)
    return _recipe(adapter, task, folder, channels_first=True)


def keras(*, task: str, folder: str) -> Recipe:
    from common import keras_models
    from hvdtrain.adapters.keras import KerasAdapter

    model, optimizer, loss = keras_models.build(task)
    return _recipe(KerasAdapter(model, optimizer, loss=loss), task, folder, channels_first=False)


def _recipe(adapter: object, task: str, folder: str, *, channels_first: bool) -> Recipe:
    data = tasks.data(TASKS[task], channels_first=channels_first)
    return Recipe(adapter=adapter, train=data, batch_size=TASKS[task].batch, epochs=10_000, callbacks=(Times(folder),))
