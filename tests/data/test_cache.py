"""A data set in memory, one copy a host."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.data.cache import HostCache, cached
from hvdtrain.data.sources import Augmented, ItemSource, on_host
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.world import World
from tests.support.harness import run_module

ALONE = LocalCommunicator(World())


class Items:
    def __init__(self, count: int = 50, odd: int = -1) -> None:
        self.count, self.odd, self.loaded = count, odd, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return {"x": np.full(4 if index == self.odd else 3, index, np.float32)}, index


def test_every_sample_is_read_once_and_then_comes_from_memory():
    items = Items()
    cache = cached(items)
    assert cache.take(np.array([3]))[1].tolist() == [3]  # before the ranks have met
    items.loaded = 0
    cache.on_host(ALONE)
    assert items.loaded == 50 + 1  # and one for the shapes
    inputs, targets = cache.take(np.array([7, 2, 7]))
    assert inputs["x"].tolist() == [[7] * 3, [2] * 3, [7] * 3]
    assert (targets.tolist(), targets.dtype) == ([7, 2, 7], np.int64)
    inputs["x"][:] = -1
    assert cache.take(np.array([7]))[0]["x"].tolist() == [[7] * 3]
    assert [part.shape for part in (lambda b: (b[0]["x"], b[1]))(cache.take(np.array([], np.int64)))] == [(0, 3), (0,)]
    assert items.loaded == 51
    cache.on_host(ALONE)  # ranks that meet again
    assert items.loaded == 52


def test_augmented_samples_come_from_the_cache_below():
    items = Items()
    source = on_host(Augmented(cached(items), lambda sample, random: (sample[0]["x"] + 1, sample[1])), ALONE)
    items.loaded = 0
    assert source.take(np.array([4]))[0].tolist() == [[5, 5, 5]]
    assert items.loaded == 0


def test_what_cannot_be_cached_is_refused():
    with pytest.raises(UsageError, match="other samples in each epoch"):
        HostCache(Augmented(Items(), lambda sample, random: sample))
    with pytest.raises(HvdtrainError, match=r"have float32 \(4,\) in array 0, sample 0 has float32 \(3,\)|stacking"):
        cached(SameShapeInBatch()).on_host(ALONE)
    with pytest.raises(UsageError, match="dtype object"):
        cached(ItemSource([object(), object()])).on_host(ALONE)


class SameShapeInBatch:
    """Longer samples in later batches."""

    def __len__(self) -> int:
        return 10

    def take(self, indices: np.ndarray) -> Any:
        return {"x": np.zeros((len(indices), 4 if indices[-1] > 5 else 3), np.float32)}


@dataclass(frozen=True)
class Elsewhere:
    """Two ranks that meet over Gloo, as seen by one."""

    world: World
    shares_memory: bool = False

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        return [value, value]


def test_ranks_without_shared_memory_have_a_copy_each_and_say_why(caplog):
    cache = cached(Items())
    with caplog.at_level(logging.WARNING):
        cache.on_host(Elsewhere(World(size=2, local_size=2)))
    assert "each rank has its own copy of the data, 0 MB: the ranks meet over Gloo" in caplog.text
    assert cache.source.items.loaded == 51


def test_data_that_does_not_fit_is_not_cached_and_that_is_said(caplog):
    class Huge(Items):
        def take(self, indices: np.ndarray) -> Any:
            return np.broadcast_to(np.float32(1), (len(indices), 1 << 40))

    with caplog.at_level(logging.WARNING):
        cache = cached(Huge(1 << 10)).on_host(ALONE)
    assert (
        "the data is not cached: a single process; copies of each rank: 4294967296 MB are needed, and memory has" in caplog.text
    )
    assert cache._filled is None


def test_memory_is_given_back_when_nobody_reads_it_any_more():
    entered, go, order = threading.Event(), threading.Event(), []

    class Reading:
        def take(self, indices: np.ndarray) -> Any:
            entered.set()
            assert go.wait(20)
            order.append("read")

    class Memory:
        def close(self) -> None:
            order.append("given back")

    cache: Any = cached(Items())
    cache._filled, cache._memory = Reading(), Memory()
    threads = [threading.Thread(target=cache.take, args=(np.zeros(1, np.int64),)), threading.Thread(target=cache.close)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    go.set()
    for thread in threads:
        thread.join(20)
    assert order == ["read", "given back"]


def test_another_process_reads_for_itself():
    cache = cached(Items())
    cache.on_host(ALONE)
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.take(np.array([3]))[1].tolist() == [3]
    assert copy._filled is None


@pytest.mark.ranks
def test_two_ranks_read_each_sample_once_together_and_share_one_copy(tmp_path):
    run_module("tests.data.test_cache", 2, tmp_path)
    loaded = [int((tmp_path / f"loaded-{rank}").read_text()) for rank in range(2)]
    assert sum(loaded) == 50 + 2
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)] == ["[[0, 49], 25]"] * 2


def _rank(out: Path) -> None:
    """One of the ranks of the test above: what it reads, and that it sees what the other writes."""
    from hvdtrain.comm.connect import connect

    comm = connect(World.from_env(), "numpy")
    items = Items()
    cache = cached(items).on_host(comm)
    (out / f"loaded-{comm.world.rank}").write_text(str(items.loaded))
    flat = cache._filled.arrays[1]
    comm.allgather(None, name="read")
    if comm.world.rank == 0:
        flat[3] = 25
    comm.allgather(None, name="written")
    first = cache.take(np.array([0, 49]))[1].tolist()
    (out / f"seen-{comm.world.rank}").write_text(str([first, int(flat[3])]))
    del flat
    cache.close()
    assert cache.take(np.array([3]))[1].tolist() == [3]
    comm.close()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
