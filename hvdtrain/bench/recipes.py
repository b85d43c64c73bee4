"""A recipe on a rank, set up to be measured: as in a training run, without its files, evaluations and checkpoints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import recipe as recipes
from hvdtrain.comm import Communicator
from hvdtrain.config import Config, resolve
from hvdtrain.data.feed import Feed, Limits, Wanted
from hvdtrain.data.loader import Batch
from hvdtrain.data.sources import as_source
from hvdtrain.devices import pin_device
from hvdtrain.metrics import Means
from hvdtrain.place import Place
from hvdtrain.recipe import Recipe
from hvdtrain.world import World


@dataclass(frozen=True)
class Wish:
    """Which recipe, and how it is to be trained."""

    recipe: str
    #: its parameters, as text
    settings: dict[str, Any] = field(default_factory=dict)
    #: of ``hvdtrain train``
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    config: Config
    recipe: Recipe
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, wish: Wish, world: World) -> Built:
        """The recipe, on its device; no rank has met another one yet."""
        config = resolve(wish.recipe, wish.settings, wish.options, {}, None)
        pin_device(world, os.environ)
        function = recipes.load(config.recipe)
        built = recipes.build(function, config.settings)
        shown = {name: _plain(value) for name, value in recipes.arguments(function, config.settings).items()}
        return cls(config, built, shown)

    @property
    def framework(self) -> str:
        return self.recipe.adapter.framework

    def place(self, comm: Communicator) -> Place:
        """Collective. This rank's place among those of ``comm``."""
        return Place.of(self.recipe, as_source(self.recipe.train), None, self.config.options, comm.world).meet(comm)


class Batches:
    """This rank's batches, epoch after epoch without end, loaded as a training run does it."""

    def __init__(self, place: Place) -> None:
        self.way = ""
        self._place = place
        wanted = Wanted.parse(place.options.loader_workers, place.options.prefetch)
        self._feed = Feed(place.loader, wanted, Limits.of(place.loader.source, place.world), self._decided)

    def __call__(self) -> Generator[Batch]:
        with closing(self._feed):
            for epoch in itertools.count():
                yield from self._feed.epoch(epoch)

    def _decided(self, way: str) -> None:
        self.way = way


def updater(built: Built, place: Place) -> Callable[[Batch], Means]:
    """Collective at each call. One update on a batch, with the learning rate and the seed of the next step."""
    adapter, steps = built.recipe.adapter, itertools.count()

    def update(batch: Batch) -> Means:
        step = next(steps)
        return adapter.train_step(batch.data, lr=place.lr(step), weight=batch.slice.weight, seed=place.layers_seed(step))

    return update


def finish(means: Means) -> None:
    """Wait for the device: its figures can be read when the steps that made them are done."""
    for mean in means.values():
        float(mean.total)


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
