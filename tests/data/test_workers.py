"""Processes that load: the same batches as without them, their errors, their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from hvdtrain.data import prefetch, workers
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.sources import ItemSource, as_source
from hvdtrain.errors import HvdtrainError, UsageError
from tests.data import slow
from tests.data.pools import passed

SAMPLER = Sampler(slow.SAMPLES, 16, seed=3)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert multiprocessing.active_children() == []


def same(found: list[Any], expected: list[Any]) -> None:
    assert [batch.slice.position for batch in found] == [batch.slice.position for batch in expected]
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.data, other.data, strict=True):
            assert np.array_equal(a, b)
            assert a.dtype == b.dtype


def test_every_rank_gets_the_batches_of_a_single_process_in_order():
    for size in (1, 2, 3):
        for rank in range(size):
            loader = Loader(as_source(slow.Python()), SAMPLER, Share.equal(rank, size))
            same(list(passed(loader, 2, 1, 48)), list(loader.epoch(1, 48)))


def test_a_pool_serves_one_pass_after_the_other_also_after_one_that_was_left():
    loader = Loader(as_source(slow.Epochs()), SAMPLER)
    pool = workers.start(loader.source, SAMPLER, loader.share, 2)
    try:
        left = loader.by(pool, 0, SAMPLER.epoch(0), 1)
        next(left)
        left.close()
        for epoch in (1, 2):
            found = [batch.data.tolist() for batch in loader.by(pool, epoch, SAMPLER.epoch(epoch), 2)]
            assert found == [(part.indices * 1000 + epoch).tolist() for part in SAMPLER.epoch(epoch)]
    finally:
        pool.close()


def test_a_pass_waits_for_the_thread_of_one_that_was_left(monkeypatch):
    monkeypatch.setattr(prefetch, "_END_S", 0.05)
    loader = Loader(slow.SlowAtFirst(0.3), SAMPLER)
    pool = workers.start(loader.source, SAMPLER, loader.share, 1)
    try:
        left = loader.by(pool, 0, SAMPLER.epoch(0), 1)
        next(left)
        left.close()  # its thread waits for the next batch
        found = [batch.data.tolist() for batch in loader.by(pool, 1, SAMPLER.epoch(1), 2)]
        assert found == [(part.indices * 1000 + 1).tolist() for part in SAMPLER.epoch(1)]
    finally:
        pool.close()


def test_processes_that_read_nothing_do_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(workers, "_work", slow.sleep)
    pool = workers.start(slow.Heavy(), SAMPLER, Share(), 2)
    while len(pool._lanes) < 2:
        time.sleep(0.01)
    time.sleep(0.2)  # more than fits into the pipe is written
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 4
    assert not pool._starter.is_alive()


def test_all_processes_load_and_none_is_the_rank():
    pids = {int(pid) for batch in passed(Loader(as_source(slow.WithPid()), SAMPLER), 2) for pid in batch.data[1]}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_rank_without_samples_gets_empty_batches():
    sampler = Sampler(2, 64)
    (batch,) = passed(Loader(as_source(slow.Python()), sampler, Share.equal(0, 8)), 1)
    assert [array.shape for array in batch.data] == [(0, 5), (0,)]


def test_arrays_can_be_taken_over_and_written_to():
    for batch in passed(Loader(as_source(slow.Python(width=33)), SAMPLER), 1):
        assert batch.data[0].flags.writeable


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", OSError, "bad disk"),
        ("odd", RuntimeError, "OddError: odd 12"),
        ("exit", RuntimeError, r"^SystemExit: 3\n"),
        ("stop", RuntimeError, r"^StopIteration\n"),
    ],
)
def test_an_error_is_raised_at_its_batch_with_the_sample_and_the_place(how, kind, text):
    bad = int(list(SAMPLER.epoch(0))[3].indices[2])
    batches = passed(Loader(ItemSource(slow.Fails(bad, how)), SAMPLER), 2)
    assert [next(batches).slice.position for _ in range(3)] == [0, 16, 32]
    with pytest.raises(kind, match=text) as raised:
        next(batches)
    assert raised.value.__notes__ == [f"while loading sample {bad}"]
    assert "slow.py" in str(raised.value.__cause__)


@pytest.mark.parametrize(("how", "text"), [("kill", "by signal 9"), ("gone", "with exit code 3")])
def test_a_process_that_dies_is_told_with_how_it_ended(how, text):
    bad = int(list(SAMPLER.epoch(0))[3].indices[2])
    with pytest.raises(HvdtrainError, match=rf"a loader process \(\d+\) ended {text}"):
        list(passed(Loader(ItemSource(slow.Fails(bad, how)), SAMPLER), 2))


def test_a_source_that_cannot_travel_is_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"cannot be given to loader processes: .*lambda"):
        list(passed(Loader(ItemSource([lambda: 1]), SAMPLER), 1))


def test_signals_for_the_job_do_not_end_the_processes_and_the_rank_does():
    batches = passed(Loader(as_source(slow.WithPid()), SAMPLER), 1)
    pid = int(next(batches).data[1][0])
    for number in (signal.SIGINT, signal.SIGUSR1):
        os.kill(pid, number)
    assert len(list(batches)) == SAMPLER.steps_per_epoch - 1


def test_a_process_in_the_middle_of_a_sample_does_not_hold_up_the_end():
    pool = workers.start(as_source(slow.Python(seconds=30.0)), SAMPLER, Share(), 1)
    while not pool.is_ready():
        time.sleep(0.01)
    began = time.monotonic()
    parts = pool.batches(0, SAMPLER.epoch(0))
    pool._lanes[0].ask((0, 0))
    pool.close()
    parts.close()
    assert time.monotonic() - began < 10
