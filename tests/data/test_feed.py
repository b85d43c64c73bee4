"""Which way batches are loaded, and that a change of the way changes no batch."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdtrain.data import feed as feeds
from hvdtrain.data import workers
from hvdtrain.data.feed import Feed, Limits, Search, Wanted, Way
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.sources import ArraySource, as_source
from hvdtrain.errors import UsageError
from hvdtrain.world import World
from tests.data import slow


@dataclass(frozen=True)
class Machine:
    """Seconds of a step and of loading a batch; how much the two slow each other down in one interpreter."""

    step: float
    load: float
    clash: float = 0.0
    busy: float = 1.0

    def times(self, way: Way) -> tuple[float, float]:
        """Of a step loaded in this way: waiting, and the rest."""
        if not way.prefetch:
            return self.load, self.step
        step = self.step if way.workers else self.step + self.clash * min(self.load, self.step)
        load = self.load / way.workers if way.workers else self.load * (1 + self.clash)
        return max(0.0, load - step), step


def search(machine: Machine, wanted: Wanted = Wanted(), limits: Limits = Limits(8)) -> tuple[Search, int]:  # noqa: B008
    """Until it has decided; how many steps that took."""
    found, steps = Search(wanted, limits), 0
    while not found.reason:
        for _ in range(found.left or 0):
            found.add(*machine.times(found.way), machine.load, machine.load * machine.busy)
            steps += 1
        if found.wants:
            found.started(found.wants)
    return found, steps


@pytest.mark.parametrize(
    ("machine", "way"),
    [
        (Machine(step=0.1, load=0.001), Way(0)),
        (Machine(step=0.1, load=0.05), Way(2)),
        (Machine(step=0.001, load=0.00004, clash=2.0), Way(0)),  # a thread costs more than it hides
        (Machine(step=0.1, load=0.3), Way(2, 4)),
        (Machine(step=0.1, load=0.09, clash=1.0), Way(2, 3)),  # Python that would share the interpreter with the step
        (Machine(step=0.01, load=1.0), Way(2, 8)),  # as many as there are processors
        (Machine(step=0.01, load=1.0, busy=0.1), Way(2, 16)),  # it mostly waits: more
    ],
)
def test_the_fastest_way_is_found(machine, way):
    found, steps = search(machine)
    assert found.way == way
    assert steps <= 80


def test_a_rank_with_one_processor_starts_no_process_for_work_but_for_waiting():
    assert search(Machine(0.1, 0.3), limits=Limits(1))[0].way == Way(2)
    assert search(Machine(0.1, 0.3, busy=0.05), limits=Limits(1))[0].way == Way(2, 4)


def test_what_cannot_be_given_to_processes_is_said_where_they_would_help():
    found, _ = search(Machine(0.1, 0.3), limits=Limits(8, "it holds a lambda"))
    assert found.way == Way(2)
    assert "waiting for data (no processes: it holds a lambda)" in found.reason
    assert "lambda" not in search(Machine(0.1, 0.05), limits=Limits(8, "it holds a lambda"))[0].reason


@pytest.mark.parametrize(
    ("workers", "prefetch", "way"),
    [("0", "0", Way(0)), ("3", "auto", Way(2, 3)), ("3", "5", Way(5, 3)), ("0", "7", Way(7)), ("auto", "0", Way(0))],
)
def test_what_is_asked_for_is_done_at_once(workers, prefetch, way):
    found = Search(Wanted.parse(workers, prefetch), Limits(8))
    assert (found.way, found.reason) == (way, "asked for")


def test_without_processes_the_step_and_the_thread_are_tried():
    assert search(Machine(0.1, 0.3), Wanted(workers=0))[0].way == Way(2)


@pytest.mark.parametrize(("workers", "prefetch"), [("many", "auto"), ("-1", "auto"), ("auto", "x"), ("2", "0")])
def test_what_makes_no_sense_is_refused(workers, prefetch):
    with pytest.raises(UsageError):
        Wanted.parse(workers, prefetch)


def test_what_a_rank_can_load_with():
    assert "memory" in Limits.of(ArraySource(np.zeros(3)), World()).refusal
    assert Limits.of(as_source(slow.Python()), World()).refusal == ""
    assert Limits.of(as_source(slow.Python()), World(size=10000, local_size=10000)).cpus == 1


@pytest.mark.parametrize(("workers", "prefetch"), [("auto", "auto"), ("0", "0"), ("1", "auto"), ("0", "3")])
@pytest.mark.parametrize("size", [1, 3])
def test_every_way_gives_the_batches_of_the_sampler_and_leaves_nothing(size, workers, prefetch):
    sampler, share = Sampler(slow.SAMPLES, 4, seed=3), Share.equal(size - 1, size)
    loader, told = Loader(as_source(slow.Python(200)), sampler, share), []
    feed = Feed(loader, Wanted.parse(workers, prefetch), Limits(8), told.append)
    for epoch, position in ((0, 88), (1, 0), (2, 0)):
        found = list(feed.epoch(epoch, position))
        assert [b.slice.indices.tolist() for b in found] == [p.indices.tolist() for p in sampler.epoch(epoch, position, share)]
        assert [b.data[1].tolist() for b in found] == [b.slice.indices.tolist() for b in found]
    feed.close()
    assert len(told) == 1 or (workers == "auto" and not told)  # processes may take longer to start than all steps
    assert multiprocessing.active_children() == []
    assert [thread.name for thread in threading.enumerate() if "hvdtrain" in thread.name] == []


def test_a_sample_is_loaded_once_whatever_is_tried():
    taken = []

    class Recorded(slow.Python):
        def take(self, indices: np.ndarray) -> np.ndarray:
            taken.extend(indices.tolist())
            return indices

    sampler = Sampler(slow.SAMPLES, 4)
    feed = Feed(Loader(Recorded(), sampler), Wanted(), Limits(8, "only here"))
    list(feed.epoch(0))
    feed.close()
    assert sorted(taken) == list(range(slow.SAMPLES))


class Pickled(slow.Python):
    """Counts how often it is."""

    times = 0

    def __getstate__(self) -> object:
        Pickled.times += 1
        return self.__dict__


def test_a_source_is_pickled_only_where_processes_are_about_to_be_tried():
    Pickled.times = 0
    source = as_source(Pickled())
    limits = Limits.of(source, World())
    for wanted in (Wanted(0), Wanted(0, 0), Wanted(None, 0), Wanted()):
        feed = Feed(Loader(source, Sampler(slow.SAMPLES, 32)), wanted, limits)
        list(feed.epoch(0))  # 7 steps
        feed.close()
    assert Pickled.times == 0


def decided(source: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a feed decides whose search wants two processes. It gives all samples in order."""
    monkeypatch.setattr(Search, "_count", lambda *_: 2)
    sampler, told, found = Sampler(slow.SAMPLES, 4, shuffle=False), [], []
    feed = Feed(Loader(source, sampler), Wanted(), Limits(8), told.append)
    try:
        for epoch in range(30):
            for batch in feed.epoch(epoch):
                found.append(batch.data[1].tolist())
            if told:
                break
    finally:
        feed.close()
    assert found == [part.indices.tolist() for epoch in range(epoch + 1) for part in sampler.epoch(epoch)]
    assert multiprocessing.active_children() == []
    return told[0]


def test_data_that_fails_in_processes_alone_goes_on_in_the_rank(monkeypatch):
    told = decided(as_source(slow.OnlyHere(0.001)), monkeypatch)
    assert "OSError: no licence here" in told
    assert "process" not in told.split(";")[0]


def test_processes_that_cannot_be_begun_end_nothing_that_ran_well(monkeypatch):
    def full(*_: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(workers, "start", full)
    told = decided(as_source(slow.Python(seconds=0.001)), monkeypatch)
    assert "no processes: BlockingIOError: Resource temporarily unavailable" in told


class InShared(slow.Python):
    """Its processes hand batches over in shared memory."""

    def take(self, indices: np.ndarray) -> Any:
        return np.stack([self[index][0] for index in indices]), indices

    def pool(self, *_: Any) -> Any:
        raise AssertionError("it was begun")


def test_where_batches_do_not_fit_into_shared_memory_no_process_is_begun(monkeypatch):
    monkeypatch.setattr(feeds, "room", lambda: 64)
    told = decided(InShared(seconds=0.001), monkeypatch)
    assert "of shared memory, and /dev/shm has 6.1e-05 MB free" in told


def test_leaving_in_the_middle_of_the_search_leaves_nothing():
    feed = Feed(Loader(as_source(slow.Python(seconds=0.001)), Sampler(slow.SAMPLES, 4)), Wanted(workers=2), Limits(8))
    batches = feed.epoch(0)
    next(batches)
    batches.close()
    feed.close()
    assert multiprocessing.active_children() == []
    assert [thread.name for thread in threading.enumerate() if "hvdtrain" in thread.name] == []
