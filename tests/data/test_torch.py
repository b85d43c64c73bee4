"""Our order in ``torch.utils.data``: every sample once an epoch, in the batches of one process, at any number of ranks."""

from __future__ import annotations

import pytest

from hvdtrain.data.sampler import Sampler
from hvdtrain.errors import UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler  # noqa: E402

from hvdtrain.data.torch import BatchSampler, DistributedSampler, RankLoader, batch_sampler  # noqa: E402


class Numbers(TensorDataset):
    def __init__(self, count: int) -> None:
        super().__init__(torch.arange(count))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("samples", "batch"), [(103, 10), (858, 32), (2, 64), (100, 10), (10, 3)])
def test_the_ranks_batches_make_up_those_of_one_process(samples, batch, size):
    single = [part.indices.tolist() for part in Sampler(samples, batch, seed=1).epoch(0)]
    ranks = [list(BatchSampler(samples, batch, rank=rank, size=size, seed=1, fill=True)) for rank in range(size)]
    assert {len(batches) for batches in ranks} == {len(single)}
    for rank in range(size):
        without = BatchSampler(samples, batch, rank=rank, size=size, seed=1)
        assert len(without) == len(list(without))
        assert len(ranks[rank]) == len(BatchSampler(samples, batch, rank=rank, size=size, fill=True))
    unfilled = [list(BatchSampler(samples, batch, rank=rank, size=size, seed=1)) for rank in range(size)]
    assert sorted(index for batches in unfilled for indices in batches for index in indices) == list(range(samples))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_short_last_batch_is_dropped_when_asked(size):
    for rank in range(size):
        sampler = BatchSampler(103, 10, rank=rank, size=size, drop_last=True)
        assert len(sampler) == len(list(sampler)) == 10


def test_each_pass_is_another_epoch_and_a_set_one_comes_again():
    sampler = BatchSampler(50, 10, seed=2)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(BatchSampler(50, 10, seed=2)) == first


def test_samples_one_by_one_are_those_of_the_batches():
    for size in (1, 2, 3):
        ranks = [list(DistributedSampler(range(103), 10, rank=rank, size=size)) for rank in range(size)]
        assert [len(DistributedSampler(range(103), 10, rank=rank, size=size)) for rank in range(size)] == list(map(len, ranks))
        assert sorted(index for part in ranks for index in part) == list(range(103))


def divided(loader, rank=0, size=2, fill=False, announce=None):
    return RankLoader(loader, batch_sampler(loader, rank=rank, size=size, seed=0, fill=fill), announce)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_divided_with_its_settings_and_says_which_batch_comes(workers):
    said = []
    loader = DataLoader(Numbers(23), batch_size=8, shuffle=True, num_workers=workers, collate_fn=lambda batch: len(batch))
    ranks = [
        list(divided(loader, rank, announce=lambda loader, part, left: said.append((len(part.indices), left))))
        for rank in (0, 1)
    ]
    assert ranks == [[4, 4, 3], [4, 4, 4]]
    assert said == [(4, 3), (4, 2), (3, 1), (4, 3), (4, 2), (4, 1)]


def test_an_unshuffled_loader_keeps_its_order_in_every_epoch():
    loader = divided(DataLoader(Numbers(10), batch_size=4))
    for _ in range(2):
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [4, 5], [8]]
    assert len(loader) == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: [1, 2], "must be a torch.utils.data.DataLoader, got a list"),
        (lambda: DataLoader(Stream(), batch_size=2), "reads a stream"),
        (lambda: DataLoader(Numbers(4), batch_size=None), "batch sampler of its own"),
        (lambda: DataLoader(Numbers(4), batch_sampler=BatchSampler(4, 2)), "batch sampler of its own, BatchSampler"),
        (lambda: DataLoader(Numbers(4), batch_size=2, sampler=WeightedRandomSampler([1.0] * 4, 4)), "sampler of its own"),
        (lambda: DataLoader(Numbers(4), batch_size=2, sampler=DistributedSampler(range(4), 2)), "it may be split already"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused(loader, message):
    with pytest.raises(UsageError, match=message):
        divided(loader())
