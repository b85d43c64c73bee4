"""A data set that is read once on each host, and then lies in memory: one copy for all ranks of the host."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import psutil

from hvdtrain.comm import Communicator
from hvdtrain.comm.shared import Field, HostMemory, room
from hvdtrain.data.sampler import Indices
from hvdtrain.data.sources import ArraySource, EpochSource, Source, as_source, leaves, like
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.progress import HERE
from hvdtrain.world import World

log = logging.getLogger(__name__)

#: bytes that are read from the source at a time
_CHUNK = 4 << 20
#: of what is free, what a cache may take
_PART = 0.9


class HostCache:
    """The samples of ``data`` in memory. All need the same shapes and dtypes.

    Until the ranks have met, and where there is no room, samples come from ``data`` itself. Ranks that meet over MPI share
    one copy on each host, which they fill together, each a part; others have a copy each. ``Augmented`` goes around it:
    ``Augmented(HostCache(data), function)``.

    Raises:
        UsageError: the data is none, or it gives other samples in each epoch.
    """

    def __init__(self, data: Any) -> None:
        self.source: Source = as_source(data)
        if isinstance(self.source, EpochSource):
            raise UsageError(
                f"a {type(self.source).__name__} gives other samples in each epoch, and a cache would keep those of the first",
                "put the cache inside: Augmented(HostCache(data), function)",
            )
        self._filled: ArraySource | None = None
        self._memory: HostMemory | None = None
        #: Held while the memory is read: a thread that loads ahead may still do that when it is given back.
        self._reading = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Indices) -> Any:
        with self._reading:
            if self._filled is not None:
                return self._filled.take(indices)
        return self.source.take(indices)

    def on_host(self, comm: Communicator) -> HostCache:
        """Collective. Fill the memory, unless it is filled."""
        sample = self.source.take(np.zeros(1, np.int64))
        arrays = [np.asarray(leaf) for leaf in leaves(sample)]
        if odd := [str(array.dtype) for array in arrays if array.dtype.hasobject]:
            raise UsageError(f"samples of dtype {odd[0]} cannot be cached", "give arrays of numbers").everywhere()
        needed = len(self) * sum(array.nbytes for array in arrays)
        shared = [_no_sharing(comm), _no_room(needed, room(), "/dev/shm")]
        refusals = comm.allgather(next(filter(None, shared), ""), name="setup/cache")
        refusal = next(filter(None, refusals), "")
        if self._filled is not None:
            return self
        HERE.enter("filling the cache of the data")
        if not refusal:
            self._memory = HostMemory(
                comm.share,
                comm.world.local_rank,
                [Field(len(self) * array[0].size, array.dtype, once=True) for array in arrays],
            )
            whole = [flat.reshape(len(self), *array.shape[1:]) for flat, array in zip(self._memory.arrays, arrays, strict=True)]
            self._fill(whole, *_part(len(self), self._memory.rank, self._memory.size))
            self._memory.meet("the cache of the data, which the ranks of this host fill")
        else:
            mine = _no_room(needed * comm.world.local_size, psutil.virtual_memory().available, "memory")
            if mine:
                _warn(comm.world, f"the data is not cached: {refusal}; copies of each rank: {mine}")
                return self
            if comm.world.size > 1:
                _warn(comm.world, f"each rank has its own copy of the data, {needed >> 20} MB: {refusal}")
            whole = [np.empty((len(self), *array.shape[1:]), array.dtype) for array in arrays]
            self._fill(whole, 0, len(self))
        self._filled = ArraySource(like(sample, whole))
        return self

    def close(self) -> None:
        """Collective. Give back what the ranks share; samples come from the data again."""
        if self._memory is not None:
            with self._reading:
                memory, self._memory, self._filled = self._memory, None, None
            memory.close()

    def __reduce__(self) -> Any:
        """Another process has no part in the memory."""
        return HostCache, (self.source,)

    def _fill(self, whole: list[Any], start: int, stop: int) -> None:
        step = max(1, _CHUNK // max(1, sum(array[:1].nbytes for array in whole)))
        for first in range(start, stop, step):
            indices = np.arange(first, min(first + step, stop))
            for place, (array, leaf) in enumerate(zip(whole, leaves(self.source.take(indices)), strict=True)):
                found = np.asarray(leaf)
                if (found.dtype, found.shape) != (array.dtype, (len(indices), *array.shape[1:])):
                    raise HvdtrainError(
                        f"samples {first} to {indices[-1]} have {found.dtype} {found.shape[1:]} in array {place}, "
                        f"sample 0 has {array.dtype} {array.shape[1:]}",
                        "a cache needs samples of one shape; leave it out, or cut or fill them up in the data set",
                    )
                array[indices[0] : indices[-1] + 1] = found
            HERE.moved()


def cached(data: Any) -> HostCache:
    """``data`` in memory, one copy a host: ``Recipe(train=cached(dataset), ...)``."""
    return HostCache(data)


def _part(count: int, rank: int, size: int) -> tuple[int, int]:
    return count * rank // size, count * (rank + 1) // size


def _no_sharing(comm: Communicator) -> str:
    if comm.world.size == 1:
        return "a single process"
    if comm.world.elastic:
        return "ranks of an elastic job may come and go"
    return "" if comm.shares_memory else "the ranks meet over Gloo, shared memory needs MPI"


def _no_room(needed: int, free: int | None, where: str) -> str:
    if free is None or needed <= _PART * free:
        return ""
    return f"{needed >> 20} MB are needed, and {where} has {free >> 20} MB free"


def _warn(world: World, text: str) -> None:
    if world.is_primary:
        log.warning(text)
