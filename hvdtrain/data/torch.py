"""Our order of samples for ``torch.utils.data``: samplers, and a loader that gives a rank its part of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Sampler as TorchSampler

from hvdtrain.data.sampler import Sampler, Share, Slice
from hvdtrain.errors import UsageError


class BatchSampler(TorchSampler[list[int]]):
    """This rank's part of each global batch, for ``DataLoader(dataset, batch_sampler=...)``.

    Each pass is an epoch of its own; ``set_epoch`` is only needed to go back to one. No sample is dropped (but by
    ``drop_last``), padded or seen twice.

    Args:
        num_samples: length of the data set.
        batch_size: samples of one batch over *all* ranks.
        rank, size: which part.
        seed: with the epoch it fixes the order.
        fill: give a rank that has no sample in a batch that batch's first one, so that it takes as many steps as the
            others; such a sample must count for nothing. Otherwise the rank gets fewer batches.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        fill: bool = False,
    ) -> None:
        self.order = Sampler(num_samples, batch_size, seed, shuffle)
        self.share, self.drop_last, self.fill = Share.equal(rank, size), drop_last, fill
        #: the epoch of the next pass
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.epoch = epoch

    def slices(self, epoch: int) -> Iterator[Slice]:
        """The batches that a pass over ``epoch`` gives."""
        for part in self.order.epoch(epoch, 0, self.share):
            if part.global_count < self.order.batch_size and self.drop_last:
                return
            if self.fill or len(part.indices):
                yield part

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for part in self.slices(epoch):
            yield part.indices.tolist() or self.order.batch(epoch, part.position).indices[:1].tolist()

    def __len__(self) -> int:
        full, rest = divmod(self.order.num_samples, self.order.batch_size)
        counts = [self.order.batch_size] * bool(full) + [rest] * (bool(rest) and not self.drop_last)
        given = [self.fill or self.share.of(count)[1] > self.share.of(count)[0] for count in counts]
        return (full if full and given[0] else 0) + (given[-1] if rest and not self.drop_last else 0)


class DistributedSampler(TorchSampler[int]):
    """This rank's samples one by one, in the order of ``BatchSampler``: a drop-in for torch's sampler of this name.

    ``DataLoader(dataset, batch_size=batch_size // size, sampler=...)`` gives each rank its part of the global batches where
    the number of ranks divides them; ``BatchSampler`` does so always.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int = 0, size: int = 1, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.batches = BatchSampler(len(dataset), batch_size, rank=rank, size=size, seed=seed, shuffle=shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        for indices in self.batches:
            yield from indices

    def __len__(self) -> int:
        order, share = self.batches.order, self.batches.share
        full, rest = divmod(order.num_samples, order.batch_size)
        (low, high), (first, last) = share.of(order.batch_size), share.of(rest)
        return full * (high - low) + last - first


class RankLoader:
    """A ``DataLoader`` made into one that gives this rank's part of each of its batches.

    Args:
        loader: as a single process has it; its ``batch_size`` is that of all ranks together.
        sampler: the batches of this rank.
        announce: called before each batch with this loader, the batch and the number of batches left, itself included.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: BatchSampler, announce: Callable[[RankLoader, Slice, int], None] | None = None
    ) -> None:
        self.batches, self._announce = sampler, announce
        self.inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
        )
        self.dataset = loader.dataset
        #: of all ranks together
        self.batch_size = sampler.order.batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        left = len(self)
        for part, batch in zip(self.batches.slices(self.batches.epoch), self.inner, strict=True):
            if self._announce is not None:
                self._announce(self, part, left)
            left -= 1
            yield batch


def batch_sampler(loader: Any, *, rank: int, size: int, seed: int, fill: bool) -> BatchSampler:
    """The sampler of this rank for the batches of a single process's ``loader``.

    Raises:
        UsageError: it is no ``DataLoader`` whose batches can be divided.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"a loader must be a torch.utils.data.DataLoader, got a {type(loader).__name__}",
            "leave it out of prepare(), and read this rank's part by hvdtrain.torch.rank() and size()",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the loader reads a stream (IterableDataset), whose samples cannot be chosen by number",
            "split the stream yourself by hvdtrain.torch.rank() and size(), and leave the loader out of prepare()",
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not TorchBatchSampler:
        raise UsageError(
            f"the loader has a batch sampler of its own, {type(loader.batch_sampler).__name__}",
            "give it batch_size and shuffle, or use hvdtrain.torch.BatchSampler in it and leave it out of prepare()",
        )
    if type(loader.sampler) not in (SequentialSampler, RandomSampler):
        raise UsageError(
            f"the loader has a sampler of its own, {type(loader.sampler).__name__}: it may be split already",
            "give it shuffle=True or False instead, or leave it out of prepare()",
        )
    if isinstance(loader.sampler, RandomSampler) and (loader.sampler.replacement or loader.sampler._num_samples is not None):
        raise UsageError("the loader draws with replacement or a part of its samples", "use a plain shuffle=True")
    return BatchSampler(
        len(loader.dataset),  # type: ignore[arg-type]
        loader.batch_size,
        rank=rank,
        size=size,
        seed=seed,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        fill=fill,
    )
