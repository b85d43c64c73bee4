"""How fast a recipe's data comes, by itself and through the loader, and how fast its step needs it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from hvdtrain.bench import machine, recipes, timing
from hvdtrain.bench.events import Finished, Observer, Progress
from hvdtrain.bench.recipes import Batches, Built, Wish
from hvdtrain.bench.results import Loading
from hvdtrain.comm import Communicator
from hvdtrain.data.loader import Batch
from hvdtrain.data.sources import as_source, take
from hvdtrain.place import Place

#: Loading keeps up if it is faster by this factor than the step: a batch that comes late now and then must be made up for.
ENOUGH = 1.1
#: The loader is to blame if it loses so much of what the source gives.
_LOSES = 0.8


@dataclass(frozen=True)
class Plan:
    wish: Wish
    seconds: float = 2.0


def measure(comm: Communicator, plan: Plan, built: Built, observe: Observer) -> None:
    """Collective. All ranks load and train at once; rates are those of all ranks together."""
    place = built.place(comm)
    observe(Progress(0, 3, "the source"))
    source_per_s = _together(comm, lambda: _drain(_direct(built, place), plan.seconds))
    observe(Progress(1, 3, "the loader"))
    batches = Batches(place)
    with closing(batches()) as source:
        _drain(source, plan.seconds, until=lambda: bool(batches.way))
        loader_per_s = _together(comm, lambda: _drain(source, plan.seconds))
    observe(Progress(2, 3, "the step"))
    adapter = built.recipe.adapter
    adapter.setup(comm, place.options.exchange_wanted)
    adapter.sync()
    update = recipes.updater(built, place)
    batch = next(_direct(built, place))
    timed = timing.tries(comm, lambda: recipes.finish(update(batch)), budget_s=plan.seconds)
    step_per_s = batch.slice.global_count / sorted(timed)[len(timed) // 2]
    place.close()
    wish = plan.wish
    report = Loading(
        machine.setup(comm), wish.recipe, built.settings, built.framework, place.sampler.batch_size,
        source_per_s, loader_per_s, step_per_s, bottleneck(source_per_s, loader_per_s, step_per_s), batches.way,
    )  # fmt: skip
    observe(Finished(report))


def bottleneck(source_per_s: float, loader_per_s: float, step_per_s: float) -> str:
    """What a run waits for: "step" if loading keeps up with it, else the "source", or the "loader" if that loses much of it."""
    if loader_per_s >= ENOUGH * step_per_s:
        return "step"
    return "loader" if loader_per_s < _LOSES * source_per_s else "source"


def _direct(built: Built, place: Place) -> Iterator[Batch]:
    """This rank's batches straight from the source, in the sampler's order."""
    source = as_source(built.recipe.train)
    for epoch in itertools.count():
        for part in place.sampler.epoch(epoch, 0, place.loader.share):
            yield Batch(part, take(source, part))


def _drain(batches: Iterator[Batch], seconds: float, until: Callable[[], bool] = lambda: False) -> float:
    """Samples a second that come if nothing is done with them."""
    next(batches)
    began, samples, spent = time.perf_counter(), 0, 0.0
    while spent < seconds and not until():
        samples += len(next(batches).slice.indices)
        spent = time.perf_counter() - began
    return samples / spent if spent else 0.0


def _together(comm: Communicator, rate: Callable[[], float]) -> float:
    """Collective. The sum over ranks that begin at the same time."""
    timing.meet(comm)
    return float(comm.allreduce([rate()], name="bench/rates")[0])
