"""Loading ahead of the step, in a thread that leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler, Share

WAIT_S = 20  # what takes milliseconds, on a machine that is busy with other things


class Recorded:
    """A source that writes down what is taken, and may fail or wait on its way."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.taken: list[list[int]] = []
        self.threads: set[str] = set()
        self.before = before

    def __len__(self) -> int:
        return 1003

    def take(self, indices: np.ndarray) -> Any:
        self.before(len(self.taken))
        self.taken.append(indices.tolist())
        self.threads.add(threading.current_thread().name)
        return indices * 10


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hvdtrain-loader"]


SAMPLER = Sampler(1003, 64, seed=5)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 3)])
def test_batches_come_in_the_order_of_the_sampler(rank: int, size: int, prefetch: int) -> None:
    source = Recorded()
    batches = list(Loader(source, SAMPLER, Share.equal(rank, size), prefetch).epoch(2))
    expected = list(SAMPLER.epoch(2, 0, Share.equal(rank, size)))
    assert [batch.slice.indices.tolist() for batch in batches] == [part.indices.tolist() for part in expected] == source.taken
    assert [batch.slice.weight for batch in batches] == [part.weight for part in expected]
    assert all(np.array_equal(batch.data, batch.slice.indices * 10) for batch in batches)
    assert _loader_threads() == []


def test_batches_are_loaded_before_they_are_asked_for_but_not_all() -> None:
    source = Recorded()
    batches = Loader(source, SAMPLER, prefetch=3).epoch(0)
    next(batches)
    # Three wait, and the thread holds one more that does not fit.
    assert _until(lambda: len(source.taken) == 1 + 3 + 1)
    time.sleep(0.25)  # longer than the thread waits for room at a time
    assert len(source.taken) == 5
    next(batches)
    assert _until(lambda: len(source.taken) == 6)
    batches.close()  # type: ignore[attr-defined]


def test_loading_and_the_step_run_at_the_same_time() -> None:
    """Each waits for the other to get on: in turns, this would never end."""
    stepping = threading.Event()

    def wait_for_step(number: int) -> None:
        if number == 1:
            assert stepping.wait(WAIT_S), "batch 1 is not loaded while the step on batch 0 runs"

    source = Recorded(wait_for_step)
    batches = Loader(source, SAMPLER).epoch(0)
    next(batches)
    stepping.set()
    assert _until(lambda: len(source.taken) >= 2)
    batches.close()  # type: ignore[attr-defined]
    assert source.threads == {"hvdtrain-loader"}


def test_without_prefetching_nothing_is_loaded_ahead_and_no_thread_runs() -> None:
    source = Recorded()
    batches = Loader(source, SAMPLER, prefetch=0).epoch(0)
    next(batches)
    assert len(source.taken) == 1
    assert source.threads == {threading.current_thread().name}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk gone"), KeyError(3), SystemExit(4)], ids=repr)
def test_an_error_in_loading_is_raised_at_its_batch(error: BaseException, prefetch: int) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise error

    batches = Loader(Recorded(fail), SAMPLER, prefetch=prefetch).epoch(0)
    good = [next(batches).slice.position for _ in range(3)]
    assert good == [0, 64, 128]
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value is error
    assert "fail" in [entry.name for entry in raised.traceback]  # where it happened, not only where it was passed on
    assert _loader_threads() == []


def test_a_source_that_says_stop_does_not_end_the_epoch_silently() -> None:
    def stop(number: int) -> None:
        if number == 1:
            raise StopIteration

    batches = Loader(Recorded(stop), SAMPLER).epoch(0)
    next(batches)
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        next(batches)
    assert "in the batch of" in raised.value.__notes__[0]


@pytest.mark.parametrize("steps", [1, 2, 15])
def test_closing_early_ends_the_thread(steps: int) -> None:
    batches = Loader(Recorded(), SAMPLER).epoch(0)
    for _ in range(steps):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert _loader_threads() == []


def test_leaving_the_loop_ends_the_thread() -> None:
    def one_step() -> None:
        for _ in Loader(Recorded(), SAMPLER).epoch(0):
            break

    one_step()
    assert _loader_threads() == []


def test_an_epoch_that_is_never_begun_starts_no_thread() -> None:
    source = Recorded()
    Loader(source, SAMPLER).epoch(0)
    assert (source.taken, _loader_threads()) == ([], [])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_loads_nothing_of_the_part_that_was_done(prefetch: int) -> None:
    order = [int(index) for part in SAMPLER.epoch(0) for index in part.indices]
    source = Recorded()
    list(Loader(source, SAMPLER, prefetch=prefetch).epoch(0, position=14 * 64))
    assert [index for part in source.taken for index in part] == order[14 * 64 :]


def test_a_rank_without_samples_gets_empty_batches() -> None:
    sampler = Sampler(2, 64)
    batches = [list(Loader(Recorded(), sampler, Share.equal(rank, 8)).epoch(0)) for rank in range(8)]
    assert [len(parts) for parts in batches] == [1] * 8
    assert sorted(len(parts[0].data) for parts in batches) == [0] * 6 + [1] * 2
