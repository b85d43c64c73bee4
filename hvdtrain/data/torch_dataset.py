"""Data sets of PyTorch as recipes have them: their samples by number, loaded by PyTorch's own worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.data import workers
from hvdtrain.data.sampler import Indices, Sampler, Share, Slice
from hvdtrain.data.sources import at_epoch, map_leaves, take
from hvdtrain.data.workers import Failure
from hvdtrain.errors import HvdtrainError, UsageError

_END_S = 1.0
#: For the thread that starts processes, and until a DataLoader has seen that its processes are gone (it looks every 5 s).
_LAST_S = 8.0


@dataclass(frozen=True)
class DatasetSource:
    """A ``torch.utils.data.Dataset`` with ``[index]`` and ``len()``.

    Args:
        dataset: with one sample an index; ``__getitems__`` is used where it has that.
        collate: makes a batch of a list of samples; its lists become tuples.
    """

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            raise UsageError(
                "the data set is a stream (IterableDataset), whose samples cannot be chosen by number",
                "give one with [index] and len(), or read the stream in a loop of your own: hvdtrain.torch.prepare(...)",
            )

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def take(self, indices: Indices) -> Any:
        # A rank without a sample still needs the batch's structure and shapes: those of sample 0, emptied.
        batch = _tuples(self.collate(self._samples(indices.tolist() or [0])))
        return batch if len(indices) else map_leaves(lambda array: array[:0], batch)

    def pool(self, sampler: Sampler, share: Share, count: int) -> DataLoaderPool:
        return DataLoaderPool(self, sampler, share, count)

    def _samples(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            found: list[Any] = self.dataset.__getitems__(indices)
            return found
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except BaseException as error:
            error.add_note(f"while loading sample {index}")
            raise


class DataLoaderPool:
    """A ``DataLoader`` whose worker processes stay, and get our order. Arrays travel in shared memory, pinned if there is a GPU."""

    def __init__(self, source: DatasetSource, sampler: Sampler, share: Share, count: int) -> None:
        workers.pickled_size(source, sampler, share)  # says what cannot be pickled; DataLoader would in a worker's words
        self._order = _Order()
        self._loader = _Quiet(
            _Batches(source, sampler, share),
            batch_size=None,  # what the data set gives are whole batches
            sampler=self._order,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=_context(),
            worker_init_fn=workers.live_with_rank,
            persistent_workers=True,
            # Else it would draw from the random stream of the training, in another thread, at a time that hangs on the machine.
            generator=torch.Generator().manual_seed(_seed(sampler, share)),
        )
        #: Held by who reads from it: the thread of a pass that was left may still wait for a batch.
        self._turn, self._pass = threading.Lock(), 0
        self._closed = False
        self._iterator: Any = None
        self._error: Exception | None = None
        # A process that starts imports PyTorch, for seconds: meanwhile the training goes on.
        self._starter = threading.Thread(target=self._start, name="hvdtrain-loader-start", daemon=True)
        self._starter.start()

    def is_ready(self) -> bool:
        if self._error is not None:
            raise HvdtrainError(f"PyTorch's loader processes do not start: {self._error}") from self._error
        return not self._starter.is_alive()

    def batches(self, epoch: int, parts: Iterable[Slice]) -> Generator[Any]:
        self._starter.join()
        self.is_ready()
        with self._turn:
            self._pass += 1
            number = self._pass
            self._order.tasks = ((epoch, part.position) for part in parts)
            with self._named():
                self._iterator = iter(self._loader)
        while True:
            with self._turn, self._named():
                if self._pass != number or (result := next(self._iterator, self)) is self:
                    return
            if isinstance(result, Failure):
                raise result.raised()
            yield _tuples(result)

    def close(self) -> None:
        self._closed = True
        self._starter.join(_LAST_S)
        if self._starter.is_alive():  # it ends what it has started
            return
        with self._turn_at_last():
            self._pass += 1
            self._end()

    @contextlib.contextmanager
    def _turn_at_last(self) -> Iterator[None]:
        """Nobody reads any more; who waits for a process that hangs is told that it is gone."""
        mine = self._turn.acquire(timeout=_END_S)
        if not mine:
            for process in getattr(self._iterator, "_workers", ()):
                process.kill()
            mine = self._turn.acquire(timeout=_LAST_S)
        try:
            yield
        finally:
            if mine:
                self._turn.release()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """PyTorch tells in many ways that a process is gone, for example by a file of it that is not found."""
        try:
            yield
        except Exception:
            processes = {process.sentinel: process for process in getattr(self._iterator, "_workers", ())}
            if gone := wait(list(processes), _END_S):
                raise workers.ended(processes[gone[0]]) from None
            raise

    def _end(self) -> None:
        processes = list(getattr(self._iterator, "_workers", ()))
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._loader._iterator = self._iterator = None
        for process in processes:
            with contextlib.suppress(ValueError):  # it is closed
                process.join(_END_S)
                process.kill()

    def _start(self) -> None:
        try:
            self._iterator = iter(self._loader)
        except Exception as error:
            self._error = error
        if self._closed:
            self._end()


class _Quiet(DataLoader[Any]):
    """Warns of no number of processes: it is asked for, or measured to be best."""

    def check_worker_number_rationality(self) -> None:
        pass


class _Order:
    """What the workers are asked for next; a sampler to the DataLoader."""

    tasks: Iterator[tuple[int, int]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.tasks


class _Batches(Dataset[Any]):
    """Whole batches, by (epoch, position)."""

    def __init__(self, source: DatasetSource, sampler: Sampler, share: Share) -> None:
        self._source, self._sampler, self._share = source, sampler, share

    def __getitem__(self, task: tuple[int, int]) -> Any:
        epoch, position = task
        try:
            return take(at_epoch(self._source, epoch), self._sampler.batch(epoch, position, self._share))
        except BaseException as error:
            return Failure.of(error)


def _seed(sampler: Sampler, share: Share) -> int:
    """Of what the processes of this rank draw: another one on each rank, since each seeds its processes by their numbers alone."""
    return int(np.random.SeedSequence([sampler.seed % (1 << 64), share.before]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])  # once for all workers
    return context


def _as_it_is(batch: Any) -> Any:
    return batch


def _tuples(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _tuples(value) for name, value in batch.items()}
    return tuple(map(_tuples, batch)) if isinstance(batch, (list, tuple)) else batch
