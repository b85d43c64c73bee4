"""Load a rank's part of each global batch ahead of the step, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.sampler import WHOLE, Sampler, Share, Slice
from hvdtrain.data.sources import EpochSource, Source, length
from hvdtrain.errors import HvdtrainError


@dataclass(frozen=True)
class Batch:
    """A rank's samples of one global batch."""

    #: which samples these are
    slice: Slice
    #: arrays with the samples on the first axis; it may have length 0
    data: Any


@dataclass(frozen=True)
class Loader:
    """Gives the batches of an epoch in order, ``prefetch`` of them loaded before they are asked for (0: without a thread)."""

    source: Source
    sampler: Sampler
    share: Share = WHOLE
    prefetch: int = 2

    def epoch(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``position`` on. What loading raises is raised here, at its batch."""
        source = self.source.at_epoch(epoch) if isinstance(self.source, EpochSource) else self.source
        batches = (Batch(part, _take(source, part)) for part in self.sampler.epoch(epoch, position, self.share))
        return self._ahead(batches) if self.prefetch > 0 else batches

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=self.prefetch)
        closed = threading.Event()

        def put(item: Batch | BaseException | None) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def load() -> None:
            try:
                for batch in batches:
                    if not put(batch):
                        return
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=load, name="hvdtrain-loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join(timeout=1.0)  # a source that hangs must not hold up the end; the thread is a daemon


def _take(source: Source, part: Slice) -> Any:
    try:
        batch = source.take(part.indices)
        if (count := length(batch)) not in (None, len(part.indices)):
            raise HvdtrainError(
                f"the data source gave {count} samples for {len(part.indices)} indices ({part})", "take(indices) gives one each"
            )
        return batch
    except Exception as error:
        if not getattr(error, "__notes__", None):  # it does not name the sample yet
            error.add_note(f"in the batch of {part}")
        raise
