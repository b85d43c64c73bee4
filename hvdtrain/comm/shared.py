"""Memory that the ranks of one host share, and the order in which they touch it.

The memory is an MPI-3 shared window. The ranks meet by counters in it: that takes microseconds where a collective of MPI or
Horovod takes ten to a thousand, gives the processor away while a rank waits, and notices a rank that has died.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.comm import Segment, futex
from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE

#: Each rank's counter and process number stand on a page of their own.
_HEADER = 4096
#: bytes, of the beginning of each part and each array: a cache line, and what TensorFlow asks of memory that it takes over
ALIGN = 64
#: Elements that are summed at a time: chunks of this size stay in the cache between reading, adding and writing.
CHUNK_BYTES = 256 << 10
#: While ranks wait: so long they look without pause (or give the processor away in between, where there are more ranks than
#: processors), then they sleep until who is missing wakes them.
_SPIN_S = 200e-6
#: First for moments, then longer and longer: to wake a processor that has gone to rest takes longer than its own short alarm.
_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3
#: What Linux may add to a sleep; by default as long as the shortest.
_SLACK_NS, _PR_SET_TIMERSLACK = 1000, 29
_LOOK_S = 0.1
#: How long a launcher that knows more of a lost rank has to end this one.
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Field:
    """An array that every rank of the host has one of, or (``once``) that the host has one of."""

    count: int
    dtype: DTypeLike = np.float32
    once: bool = False

    @property
    def nbytes(self) -> int:
        size = self.count * np.dtype(self.dtype).itemsize
        return -(-size // ALIGN) * ALIGN


def bytes_needed(fields: Sequence[Field], *, first: bool) -> int:
    """What a rank brings to the memory; the ``first`` of a host also what there is only one of."""
    return _HEADER + sum(field.nbytes for field in fields if first or not field.once)


class HostMemory:
    """Arrays in shared memory, all zeros, and meetings. Made alike by all ranks of the host.

    Args:
        make: Collective. Makes a segment of so many bytes of this rank's.
        local_rank: this rank's place on its host.
        fields: what the memory holds, the same on all ranks.
    """

    def __init__(self, make: Callable[[int], Segment], local_rank: int, fields: Sequence[Field]) -> None:
        self._segment = make(bytes_needed(fields, first=local_rank == 0))
        self.rank, self.size, self.ranks = self._segment.rank, len(self._segment.parts), tuple(self._segment.ranks)
        self._counters = [part[:8].cast("q") for part in self._segment.parts]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(counter)) for counter in self._counters]
        #: whether a rank wants to be woken; on another cache line, as it changes seldom and is read at each meeting
        self._sleepers = [part[ALIGN : ALIGN + 8].cast("q") for part in self._segment.parts]
        #: a process and the namespace in which it has this number
        self._processes = [part[2 * ALIGN : 2 * ALIGN + 16].cast("q") for part in self._segment.parts]
        self._met = 0
        #: more ranks than processors: who is waited for may want this one
        self._crowded = self.size > _processors()
        offset, once = _HEADER, _HEADER + sum(field.nbytes for field in fields if not field.once)
        #: of each field: the array of each rank, or the one that all have
        self.arrays: list[Any] = []
        for field in fields:
            if field.once:
                self.arrays.append(_array(self._segment.parts[0], once, field))
                once += field.nbytes
            else:
                self.arrays.append([_array(part, offset, field) for part in self._segment.parts])
                offset += field.nbytes
        for field, arrays in zip(fields, self.arrays, strict=True):  # touched now, there is room for it later too
            if field.once:
                arrays[share(field.count, self.rank, self.size)] = 0
            else:
                arrays[self.rank][:] = 0
        self._processes[self.rank][0], self._processes[self.rank][1] = os.getpid(), _namespace()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)  # of this thread, in which the ranks meet
        self.meet("the set-up of shared memory with")

    def meet(self, what: str) -> None:
        """Collective over the host. Returns when all ranks have come so far; what they wrote before can be read then.

        Args:
            what: they meet for, for those who look: "the exchange of gradients with" is followed by the ranks that are missing.

        Raises:
            HvdtrainError: the process of a rank that has not come is gone.
        """
        self._met += 1
        self._segment.fence()
        self._counters[self.rank][0] = self._met
        self._segment.fence()  # either who falls asleep sees the counter, or this rank sees that it sleeps
        for sleeper in self._sleepers:
            if sleeper[0]:
                futex.wake(self._addresses[self.rank])
                break
        for counter in self._counters:
            if counter[0] < self._met:
                self._wait(what)
                break
        self._segment.fence()

    def close(self) -> None:
        """Collective over the host."""
        self.arrays = []
        self._counters, self._sleepers, self._processes = [], [], []
        self._segment.free()

    def _missing(self) -> list[int]:
        return [rank for rank, counter in enumerate(self._counters) if counter[0] < self._met]

    def _wait(self, what: str) -> None:
        since = time.perf_counter()
        while (waited := time.perf_counter() - since) < _SPIN_S:
            if not self._missing():
                return
            if self._crowded:
                os.sched_yield()
        pause, looked = _SLEEP_S, waited
        with HERE.waits(what, lambda: [f"rank {self.ranks[place]}" for place in self._missing()]):
            self._sleepers[self.rank][0] = 1
            self._segment.fence()
            try:
                while missing := self._missing():
                    self._sleep(missing[0], pause)
                    pause = min(1.1 * pause, _LONGEST_SLEEP_S)
                    if (waited := time.perf_counter() - since) - looked > _LOOK_S:
                        looked = waited
                        self._look(missing, what)
            finally:
                self._sleepers[self.rank][0] = 0

    def _sleep(self, place: int, seconds: float) -> None:
        """Until the rank at ``place`` comes, or for ``seconds``."""
        seen = self._counters[place][0]
        if seen < self._met and not futex.wait(self._addresses[place], seen, seconds):
            time.sleep(seconds)

    def _look(self, missing: Sequence[int], what: str) -> None:
        for place in missing:
            process, namespace = self._processes[place]
            if process and namespace == _namespace() and not _is_alive(process) and place in self._missing():
                time.sleep(_PATIENCE_S)
                raise HvdtrainError(
                    f"rank {self.ranks[place]} (process {process}) has ended, and this rank waits in {what} it",
                    "its own words, or the launcher's, say why",
                )


class HostSum:
    """One flat array on each rank of a host, and their sum: each rank adds up its share of it, in place.

    The sum is the same on all ranks, bit by bit, since each element is added by one rank, in the order of the ranks.
    """

    def __init__(self, memory: HostMemory, flats: Sequence[NDArray[Any]]) -> None:
        self._flats = flats
        #: what this rank brings; all of the sum after ``add_share``, spread, and a meeting
        self.mine = flats[memory.rank]
        #: where this rank's share of the sum is after ``add_share``
        self.sums = flats[0]
        self.share = share(len(self.mine), memory.rank, memory.size)
        self._chunk = max(1, CHUNK_BYTES // self.mine.itemsize)

    def add_share(self, *, spread: bool, squared: bool = True) -> float:
        """Add up this rank's share, after a meeting; with ``squared`` the sum of its squares is returned.

        It stands in ``sums`` then, and with ``spread`` in every rank's array (to be read after one more meeting).
        """
        squares = 0.0
        with np.errstate(all="ignore"):  # what is not finite shows in the result
            for start in range(self.share.start, self.share.stop, self._chunk):
                piece = slice(start, min(start + self._chunk, self.share.stop))
                total, *others = [flat[piece] for flat in self._flats]
                for other in others:
                    np.add(total, other, out=total)
                for other in others if spread else ():
                    np.copyto(other, total)
                if squared:
                    squares += float(np.dot(total, total))
        return squares

    def squares(self) -> float:
        """The sum of the squares of this rank's share of ``sums``."""
        found, stop = 0.0, self.share.stop
        with np.errstate(all="ignore"):
            for start in range(self.share.start, stop, self._chunk):
                piece = self.sums[start : min(start + self._chunk, stop)]
                found += float(np.dot(piece, piece))
        return found

    def spread(self) -> None:
        """Copy this rank's share of ``sums`` into every rank's array."""
        for flat in self._flats[1:]:
            flat[self.share] = self.sums[self.share]


def aligned(count: int) -> int:
    """So many elements, and as many more as a cache line takes (of float32) to be full."""
    step = ALIGN // 4
    return -(-count // step) * step


def share(count: int, rank: int, size: int) -> slice:
    """The part of ``count`` elements that a rank works on: equal ones, cut where cache lines end."""
    cut = [min(count, aligned(math.ceil(count * place / size))) for place in (rank, rank + 1)]
    return slice(cut[0], cut[1] if rank + 1 < size else count)


def room(path: Path = Path("/dev/shm")) -> int | None:
    """Bytes that are free where shared memory lives; None where that cannot be told.

    More than that can be asked for, and the process is killed when it is touched.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _namespace() -> int:
    """Where this process's number is its own: containers that share memory may have others. 0 where that cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _array(part: memoryview, offset: int, field: Field) -> NDArray[Any]:
    return np.frombuffer(part, dtype=field.dtype, count=field.count, offset=offset)


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True
