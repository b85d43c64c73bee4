"""Batches that processes load."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from hvdtrain.data import workers
from hvdtrain.data.loader import Batch, Loader


def passed(loader: Loader, count: int, epoch: int = 0, position: int = 0) -> Generator[Batch]:
    """Those of ``epoch`` from ``position`` on, by ``count`` processes that live as long as this pass."""
    with closing(workers.start(loader.source, loader.sampler, loader.share, count)) as pool:
        yield from loader.by(pool, epoch, loader.sampler.epoch(epoch, position, loader.share), loader.prefetch)
