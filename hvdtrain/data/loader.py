"""A rank's part of each global batch, loaded in the step, ahead of it in a thread, or in processes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.prefetch import ahead
from hvdtrain.data.sampler import WHOLE, Sampler, Share, Slice
from hvdtrain.data.sources import Source, at_epoch, take
from hvdtrain.data.workers import Pool


@dataclass(frozen=True)
class Batch:
    """A rank's samples of one global batch."""

    #: which samples these are
    slice: Slice
    #: arrays with the samples on the first axis; it may have length 0
    data: Any


@dataclass(frozen=True)
class Loader:
    """Gives the batches of an epoch in order.

    Args:
        prefetch: as many are loaded before they are asked for (0: without a thread).
    """

    source: Source
    sampler: Sampler
    share: Share = WHOLE
    prefetch: int = 2

    def epoch(self, epoch: int, position: int = 0) -> Generator[Batch]:
        """The batches of ``epoch`` from ``position`` on. What loading raises is raised here, at its batch."""
        return self.within(epoch, self.sampler.epoch(epoch, position, self.share), self.prefetch)

    def within(self, epoch: int, parts: Iterable[Slice], prefetch: int) -> Generator[Batch]:
        """The batches ``parts`` of ``epoch``, loaded by this process."""
        source = at_epoch(self.source, epoch)
        yield from _ahead((Batch(part, take(source, part)) for part in parts), prefetch)

    def by(self, pool: Pool, epoch: int, parts: Iterable[Slice], prefetch: int) -> Generator[Batch]:
        """The batches ``parts`` of ``epoch``, loaded by ``pool``, and fetched from there ahead of the step."""
        asked: list[Slice] = []

        def noted() -> Iterator[Slice]:
            for part in parts:
                asked.append(part)
                yield part

        batches = (Batch(asked.pop(0), data) for data in pool.batches(epoch, noted()))
        yield from _ahead(batches, prefetch)


def _ahead(batches: Iterator[Batch], prefetch: int) -> Iterator[Batch]:
    return ahead(batches, prefetch) if prefetch > 0 else batches
