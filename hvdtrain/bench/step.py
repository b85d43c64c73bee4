"""How long a recipe's step takes with an exchange of gradients, and without one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.bench import machine, recipes, timing
from hvdtrain.bench.events import Finished, Observer, Progress
from hvdtrain.bench.recipes import Batches, Built, Wish
from hvdtrain.bench.results import Step, Steps, Timing
from hvdtrain.comm import Communicator
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.data.loader import Batch
from hvdtrain.world import World

#: Each rank by itself.
NONE = "none"
#: The training loop looks at its figures so often, which waits for a device.
_LAP_STEPS, _LAP_S = 10, 0.1
_WARM_UP_S, _WARM_UP_LAPS = 1.0, 12
_FEWEST, _MOST = 5, 200


@dataclass(frozen=True)
class Plan:
    wish: Wish
    #: "none", or as ``--exchange`` takes it
    exchange: str = NONE
    seconds: float = 3.0


@dataclass
class _Lap:
    """Seconds of a step, means over a few."""

    step: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def measure(comm: Communicator, plan: Plan, built: Built, observe: Observer) -> None:
    """Collective. Steps with one exchange. In the one called "none", each rank trains with its own part of the batch by itself."""
    place = built.place(comm)
    adapter = built.recipe.adapter
    chosen = ""
    if plan.exchange == NONE or comm.world.size == 1:
        adapter.setup(LocalCommunicator(World()))
    else:
        chosen = adapter.setup(comm, replace(place.options, exchange=plan.exchange).exchange_wanted)  # type: ignore[arg-type]
        adapter.sync()
    in_update = _watch_update(adapter)
    lap = _Laps(built, place, in_update)
    batches = Batches(place)
    observe(Progress(0, 2, f"{plan.exchange}, warming up"))
    with closing(batches()) as source:
        steps, once = warm_up(comm, lambda steps: lap.run(source, steps), lambda: bool(batches.way))
        observe(Progress(1, 2, plan.exchange))
        found = lap.found = _Lap()
        for _ in range(max(_FEWEST, min(_MOST, math.ceil(plan.seconds / (once * steps))))):
            lap.run(source, steps)
    place.close()
    taken = Timing.of(found.step)
    everyone = comm.allgather((taken, statistics.median(found.data), _median(found.update)), name="bench/step")
    slowest = max(everyone, key=lambda each: each[0].median_s)
    step = _step(plan.exchange, chosen, slowest, place.sampler.batch_size)
    setup = machine.setup(comm)
    wish = plan.wish
    observe(Finished(Steps(setup, wish.recipe, built.settings, built.framework, place.sampler.batch_size, (step,), {})))


def warm_up(comm: Communicator, lap: Callable[[int], float], is_decided: Callable[[], bool]) -> tuple[int, float]:
    """Collective. Laps until frameworks have traced their first step and the loaders of all ranks have tried their ways.

    Args:
        lap: does so many steps, and returns the seconds of one.
        is_decided: whether this rank's loader has chosen its way.

    Returns:
        the steps of a lap that takes about ``_LAP_S``, and the seconds of one on the slowest rank; the same on all ranks.
    """
    steps, laps = 1, 0
    spent = once = 0.0
    undecided = 1.0
    while spent < _WARM_UP_S or (laps < _WARM_UP_LAPS and undecided and spent < 5 * _WARM_UP_S):
        # In one reduction: all ranks go on, or none does.
        once, undecided = timing.slowest(comm, [lap(steps), float(not is_decided())])
        spent, laps = spent + once * steps, laps + 1
        steps = max(1, min(_LAP_STEPS, math.ceil(_LAP_S / once)))
    return steps, once


def merge(runs: Sequence[Steps]) -> Steps:
    """One report of many runs, a few of each exchange: medians over its runs."""
    names = list(dict.fromkeys(run.steps[0].exchange for run in runs))
    steps = [_over([run.steps[0] for run in runs if run.steps[0].exchange == name]) for name in names]
    base = next((step for step in steps if step.exchange == NONE), None)
    if base is not None:
        steps = [step if step is base else replace(step, exposed_s=step.step.median_s - base.step.median_s) for step in steps]
    return replace(runs[0], steps=tuple(steps))


def _over(steps: Sequence[Step]) -> Step:
    """One exchange's, over its rounds."""
    medians = [step.step.median_s for step in steps]
    taken = Timing(
        statistics.median(medians),
        min(step.step.fastest_s for step in steps),
        statistics.median([step.step.low_s for step in steps]),
        statistics.median([step.step.high_s for step in steps]),
        sum(step.step.count for step in steps),
    )
    updates = [step.update_s for step in steps if step.update_s is not None]
    return replace(
        steps[0],
        step=taken,
        rounds_s=tuple(medians),
        data_s=statistics.median([step.data_s for step in steps]),
        compute_s=statistics.median([step.compute_s for step in steps]),
        update_s=statistics.median(updates) if updates else None,
        samples_per_s=statistics.median([step.samples_per_s for step in steps]),
    )


def _step(exchange: str, chosen: str, slowest: tuple[Timing, float, float | None], batch_size: int) -> Step:
    taken, data_s, update_s = slowest
    return Step(
        exchange=exchange,
        chosen=chosen,
        step=taken,
        rounds_s=(taken.median_s,),
        data_s=data_s,
        compute_s=taken.median_s - data_s - (update_s or 0.0),
        update_s=update_s,
        exposed_s=None,
        samples_per_s=batch_size / taken.median_s,
    )


class _Laps:
    """Does steps and times them, a lap of a few at a time."""

    def __init__(self, built: Built, place: Any, in_update: list[float] | None) -> None:
        self.found = _Lap()
        self._update, self._in_update = recipes.updater(built, place), in_update

    def run(self, batches: Iterator[Batch], steps: int) -> float:
        """Collective. Seconds of one of ``steps`` steps."""
        if self._in_update is not None:
            self._in_update.clear()
        waited = 0.0
        began = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            means = self._update(batch)
        recipes.finish(means)
        seconds = (time.perf_counter() - began) / steps
        self.found.step.append(seconds)
        self.found.data.append(waited / steps)
        if self._in_update is not None:
            self.found.update.append(sum(self._in_update) / steps)
        return seconds


def _watch_update(adapter: Any) -> list[float] | None:
    """Where the seconds of each update by the optimizer go; None for an adapter that does all of a step in one call.

    PyTorch's has an exchange with an ``update``. Hooks of the optimizer would keep it from being shared.
    """
    exchange: Any = getattr(adapter, "_exchange", None)
    update: Callable[[], None] | None = getattr(exchange, "update", None)
    if update is None:
        return None
    taken: list[float] = []

    def timed() -> None:
        began = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began)

    exchange.update = timed
    return taken


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
