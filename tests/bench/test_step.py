from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdtrain.bench import results, step
from hvdtrain.bench.loading import bottleneck
from hvdtrain.bench.results import Step, Steps, Timing
from hvdtrain.bench.step import merge
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.world import World
from tests.bench.examples import SETUP
from tests.support import recipes


def run(exchange: str, seconds: float, update_s: float | None = 0.001) -> Steps:
    taken = Timing.of([seconds, 1.1 * seconds, 0.9 * seconds])
    step = Step(exchange, f"about {exchange}", taken, (seconds,), 0.001, seconds - 0.002, update_s, None, 64 / seconds)
    return Steps(SETUP, "a.py", {"lr": 0.1}, "torch", 64, (step,), {})


def test_the_rounds_of_an_exchange_become_one_and_what_is_exposed_is_told():
    runs = [
        run(name, seconds) for seconds in (1.0, 1.2, 1.1) for name, seconds in (("none", seconds), ("shared", 1.5 * seconds))
    ]
    report = merge(runs)
    alone, shared = report.steps
    assert (alone.exchange, shared.exchange) == ("none", "shared")
    assert alone.rounds_s == (1.0, 1.2, 1.1)
    assert alone.step.median_s == 1.1
    assert alone.step.fastest_s == pytest.approx(0.9)
    assert alone.step.count == 9
    assert alone.exposed_s is None
    assert shared.exposed_s == pytest.approx(0.55)
    assert shared.update_s == 0.001
    assert results.from_json(results.to_json(report)) == report


def test_a_framework_with_one_call_has_no_time_of_the_update():
    assert merge([run("none", 1.0, None), run("none", 2.0, None)]).steps[0].update_s is None


def test_without_the_step_alone_nothing_is_told_of_what_is_exposed():
    assert merge([run("shared", 1.0)]).steps[0].exposed_s is None


@pytest.mark.parametrize(
    ("source", "loader", "step", "named"),
    [(100, 90, 50, "step"), (100, 90, 90, "source"), (100, 50, 90, "loader"), (40, 40, 90, "source"), (40, 200, 90, "step")],
)
def test_the_bottleneck_is_named(source: float, loader: float, step: float, named: str):
    assert bottleneck(source, loader, step) == named


@dataclass(frozen=True)
class Threads(LocalCommunicator):
    """Ranks that are threads of this process: the maximum over them."""

    meeting: threading.Barrier
    given: dict[int, np.ndarray]

    def allreduce(self, values: Any, *, name: str, op: str = "sum") -> np.ndarray:
        self.given[self.world.rank] = np.array(values)
        self.meeting.wait()
        found = np.max(list(self.given.values()), axis=0)
        self.meeting.wait()
        return found


def test_ranks_end_their_warm_up_together_where_one_has_chosen_its_way_of_loading_earlier():
    meeting, given = threading.Barrier(2, timeout=5.0), {}

    def rank(number: int) -> tuple[int, tuple[int, float]]:
        laps = 0

        def lap(steps: int) -> float:
            nonlocal laps
            laps += 1
            return 0.3 / steps

        comm = Threads(World(number, 2), meeting, given)
        found = step.warm_up(comm, lap, lambda: laps >= (3, 7)[number])
        return laps, found

    with ThreadPoolExecutor(2) as ranks:
        (laps, first), (others, second) = ranks.map(rank, range(2))
    assert (laps, first) == (others, second)
    assert laps == 7


def test_the_update_of_pytorchs_optimizer_is_timed():
    # It reaches into the adapter: what is renamed there would leave out the column in silence.
    adapter = recipes.torch().adapter
    adapter.setup(LocalCommunicator(World()))
    taken = step._watch_update(adapter)
    assert taken == []
    adapter.train_step(recipes.arrays(4), lr=0.1, weight=1.0)
    assert len(taken) == 1
