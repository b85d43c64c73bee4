"""Recipes' PyTorch data sets: in our order, by PyTorch's own worker processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, IterableDataset, TensorDataset  # noqa: E402

from hvdtrain.data import prefetch, torch_dataset, workers  # noqa: E402
from hvdtrain.data.loader import Loader  # noqa: E402
from hvdtrain.data.sampler import Sampler, Share  # noqa: E402
from hvdtrain.data.sources import as_source  # noqa: E402
from hvdtrain.data.torch_dataset import DataLoaderPool, DatasetSource  # noqa: E402
from hvdtrain.errors import HvdtrainError, UsageError  # noqa: E402
from tests.data import slow  # noqa: E402
from tests.data.pools import passed  # noqa: E402

SAMPLER = Sampler(103, 16, seed=3)
X, Y = torch.arange(206.0).reshape(103, 2), torch.arange(103)


class Mixed(Dataset[Any]):
    """NumPy, numbers and dicts in a sample; one sample may be bad."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("bad disk")
        return {"x": np.full(3, index, np.float32), "pid": os.getpid()}, index


class Fails(slow.Fails, Dataset[Any]):
    """The data set of this name, as one of PyTorch."""


class Sluggish(Mixed):
    """Batches that take a quarter of a second."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.25 / 16)
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_data_set_of_pytorch_gives_tensors_in_the_form_of_its_samples():
    source = as_source(TensorDataset(X, Y))
    assert isinstance(source, DatasetSource)
    inputs, targets = source.take(np.array([4, 0]))
    assert torch.equal(inputs, X[[4, 0]])
    assert torch.equal(targets, Y[[4, 0]])
    inputs, targets = source.take(np.array([], np.int64))
    assert (inputs.shape, targets.shape, targets.dtype) == ((0, 2), (0,), torch.int64)


def test_several_samples_are_got_at_once_where_the_data_set_can():
    class AtOnce(Mixed):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(index, index * 10) for index in indices]

    assert [part.tolist() for part in as_source(AtOnce()).take(np.array([4, 0]))] == [[4, 0], [40, 0]]


def test_a_stream_is_refused():
    with pytest.raises(UsageError, match="stream"):
        as_source(Stream())


def test_worker_processes_give_the_same_batches_in_every_pass_and_their_number_is_not_warned_of(monkeypatch):
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 1)
    source = as_source(Mixed())
    for share, position in ((Share.equal(1, 3), 32), (Share.equal(7, 40), 0)):
        loader = Loader(source, SAMPLER, share)
        pool = workers.start(source, SAMPLER, share, 2)
        assert isinstance(pool, DataLoaderPool)
        try:
            for epoch in (0, 1):
                found = list(loader.by(pool, epoch, SAMPLER.epoch(epoch, position, share), 2))
                expected = list(loader.epoch(epoch, position))
                assert [batch.slice.indices.tolist() for batch in found] == [b.slice.indices.tolist() for b in expected]
                for one, other in zip(found, expected, strict=True):
                    assert type(one.data) is tuple
                    assert torch.equal(one.data[0]["x"], other.data[0]["x"])
                    assert torch.equal(one.data[1], other.data[1])
                    assert os.getpid() not in one.data[0]["pid"]
        finally:
            pool.close()
        assert multiprocessing.active_children() == []


def test_an_error_keeps_its_kind_and_names_the_sample():
    bad = int(list(SAMPLER.epoch(0))[3].indices[2])
    with pytest.raises(OSError, match="bad disk") as raised:
        list(passed(Loader(as_source(Mixed(bad)), SAMPLER), 2))
    assert raised.value.__notes__ == [f"while loading sample {bad}"]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("how", "text"), [("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")])
def test_a_data_set_that_wants_to_end_its_worker_is_told_with_the_sample(how, text):
    bad = int(list(SAMPLER.epoch(0))[3].indices[2])
    with pytest.raises(RuntimeError, match=rf"^{text}\n") as raised:
        list(passed(Loader(as_source(Fails(bad, how)), SAMPLER), 2))
    assert raised.value.__notes__ == [f"while loading sample {bad}"]
    assert "slow.py" in str(raised.value.__cause__)


def test_a_process_that_dies_is_told_by_its_signal():
    bad = int(list(SAMPLER.epoch(0))[3].indices[2])
    with pytest.raises(HvdtrainError, match=r"a loader process \(\d+\) ended by signal 9") as raised:
        list(passed(Loader(as_source(Fails(bad, "kill")), SAMPLER), 2))
    assert "--loader-workers" in raised.value.hint
    assert raised.value.__suppress_context__
    assert multiprocessing.active_children() == []


def test_a_pass_waits_for_the_thread_of_one_that_was_left_and_the_random_stream_of_the_training_stays(monkeypatch):
    monkeypatch.setattr(prefetch, "_END_S", 0.05)
    before = torch.get_rng_state()
    loader = Loader(as_source(Sluggish()), SAMPLER)
    pool = workers.start(loader.source, SAMPLER, loader.share, 2)
    try:
        left = loader.by(pool, 0, SAMPLER.epoch(0), 1)
        next(left)
        left.close()  # its thread waits for the next batch
        found = [batch.data[1].tolist() for batch in loader.by(pool, 1, SAMPLER.epoch(1), 2)]
        assert found == [part.indices.tolist() for part in SAMPLER.epoch(1)]
    finally:
        pool.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_processes_of_each_rank_draw_other_numbers():
    assert (
        len({torch_dataset._seed(Sampler(103, 16, seed), Share.equal(rank, 3)) for seed in (-1, 5) for rank in range(3)}) == 6
    )
