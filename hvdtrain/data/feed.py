"""How batches are loaded in a run: in the step, by a thread or by processes, whichever is seen to be fastest."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.comm.shared import room
from hvdtrain.data import workers
from hvdtrain.data.loader import Batch, Loader
from hvdtrain.data.sampler import Slice
from hvdtrain.data.sources import ArraySource, Source, at_epoch, leaves
from hvdtrain.data.workers import Pool, PoolSource
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.world import World

DEPTH = 2
#: What another way has to gain over a simpler one: no other is tried where loading takes less than that of a step.
_GAIN = 0.05
#: Of a step: the wait for a thread before processes are tried.
_WAITS = 0.05
#: Steps that a way is tried for, without the first ones, in which queues fill. Of the first steps of all, frameworks trace one.
_TRIED, _FILLING, _TRACING = 16, 4, 2
#: While processes start, the thread goes on for so many steps at a time.
_MEANWHILE = 8
#: bytes that all copies of a source may take on a host
_COPIES = 1 << 30
#: Of the free shared memory, what batches on their way may take: the next ones may be larger, and others want some.
_OF_ROOM = 0.5
_MOST_WORKERS = 16


@dataclass(frozen=True)
class Way:
    """``prefetch`` batches are ready before they are asked for, and ``workers`` processes load them; 0 and 0: the step loads."""

    prefetch: int
    workers: int = 0

    def __str__(self) -> str:
        if self.workers:
            return f"{self.workers} process{'es' if self.workers > 1 else ''} on each rank"
        return f"a thread, {self.prefetch} ahead" if self.prefetch else "within the step"


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; None: as it is measured."""

    workers: int | None = None
    prefetch: int | None = None

    @classmethod
    def parse(cls, workers: str, prefetch: str) -> Wanted:
        """From ``--loader-workers`` and ``--prefetch``.

        Raises:
            UsageError: one is neither "auto" nor a whole number of 0 or more, or they exclude each other.
        """
        found = cls(_number("--loader-workers", workers), _number("--prefetch", prefetch))
        if found.workers and found.prefetch == 0:
            raise UsageError(
                f"--loader-workers {workers} loads ahead of the step, and --prefetch 0 forbids it", "leave out --prefetch"
            )
        return found


@dataclass(frozen=True)
class Limits:
    """What a rank has to load with."""

    #: processors
    cpus: int
    #: why processes cannot be tried; empty if they may be
    refusal: str = ""
    #: ranks of this host, which all load
    ranks: int = 1

    @classmethod
    def of(cls, source: Source, world: World) -> Limits:
        """This rank's."""
        in_memory = "arrays in memory are copied as fast by a thread" if isinstance(source, ArraySource) else ""
        return cls(max(1, len(os.sched_getaffinity(0)) // max(1, world.local_size)), in_memory, max(1, world.local_size))


@dataclass
class _Times:
    """Seconds of steps: waiting for a batch, and with it until the next one is asked for."""

    waits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def wait(self) -> float:
        return statistics.median(self.waits[_FILLING:] or self.waits)

    @property
    def whole(self) -> float:
        return statistics.median([wait + step for wait, step in zip(self.waits, self.steps, strict=True)][_FILLING:])

    @property
    def share(self) -> float:
        return self.wait / self.whole if self.whole else 0.0


class Search:
    """Which way to load. It is told what each step took, and tries the ways one after the other.

    A rank decides for itself: nothing that ranks do together hangs on it.
    """

    def __init__(self, wanted: Wanted, limits: Limits) -> None:
        self._wanted, self._limits = wanted, limits
        self._times: dict[Way, _Times] = {}
        self._ignored = _TRACING
        #: batches that are to be ready, where any are loaded ahead
        self.depth = DEPTH if wanted.prefetch is None else wanted.prefetch
        self._in_step, self._thread = Way(0), Way(self.depth)
        #: of loading one batch, as it was seen: seconds, and the part of them in which a processor worked
        self._load_s, self._busy = 0.0, 1.0
        #: why it was decided so; empty before
        self.reason = ""
        #: processes that are wanted next to try them
        self.wants = 0
        if wanted.workers:
            self._decide(Way(self.depth, wanted.workers), "asked for")
        elif wanted.prefetch is None:
            self._try(self._in_step)
        elif wanted.prefetch == 0 or wanted.workers == 0:
            self._decide(self._thread, "asked for")
        else:
            self._try(self._thread)

    @property
    def left(self) -> int | None:
        """Steps until it wants to be asked again; None: for ever."""
        if self.reason:
            return None
        if self.wants:
            return _MEANWHILE
        return _TRIED + _FILLING + self._ignored - len(self._times[self.way].waits)

    def add(self, wait_s: float, step_s: float, load_s: float = 0.0, cpu_s: float = 0.0) -> None:
        """A step that waited ``wait_s`` for its batch; loading one took ``load_s``, of which ``cpu_s`` on a processor."""
        if self.reason or self.wants:
            return
        if self._ignored:
            self._ignored -= 1
            return
        times = self._times[self.way]
        times.waits.append(wait_s)
        times.steps.append(step_s)
        if load_s:
            self._load_s += (load_s - self._load_s) / len(times.waits)
            self._busy += (min(1.0, cpu_s / load_s) - self._busy) / len(times.waits)
        if len(times.waits) == _TRIED + _FILLING:
            self._next(times)

    def started(self, count: int) -> None:
        """The processes that were wanted can load."""
        self.wants = 0
        self._try(Way(self.depth, count))

    def refused(self, why: str) -> None:
        """They cannot, or they failed while they were tried."""
        self.wants = 0
        self._limits = replace(self._limits, refusal=why)
        self._times = {way: times for way, times in self._times.items() if not way.workers}
        self._settle()

    def _try(self, way: Way) -> None:
        self.way, self._times[way] = way, _Times()

    def _decide(self, way: Way, reason: str) -> None:
        self.way, self.reason = way, reason

    def _next(self, times: _Times) -> None:
        if self.way == self._in_step:
            if times.share < _GAIN:
                self._decide(self.way, f"it takes {times.share:.1%} of a step")
            else:
                self._try(self._thread)
        elif self.way == self._thread:
            count = self._count(times)
            short = times.whole > (1 + _WAITS) * self._step_s(times)
            if short and count and not self._limits.refusal and self._wanted.workers is None:
                self.wants = count
            else:
                self._settle()
        else:
            self._settle()

    def _count(self, times: _Times) -> int:
        """Processes that keep up with the step, as far as there are processors for them while they work."""
        needed = math.ceil(1.1 * max(self._load_s, times.whole) / self._step_s(times))
        possible = int(self._limits.cpus / max(self._busy, 1 / _MOST_WORKERS))
        if possible < 2 and self._busy > 0.5:  # one process more than processors wins nothing
            return 0
        return min(needed, possible, _MOST_WORKERS)

    def _step_s(self, times: _Times) -> float:
        """Of a step that nothing is loaded in, and that shares the interpreter with no thread if that was seen."""
        alone = self._times.get(self._in_step, times)
        return max(alone.whole - alone.wait, 1e-6)

    def _settle(self) -> None:
        """Decide for the fastest way, a simpler one if it is not much slower."""
        best, *others = self._times
        for way in others:
            if self._times[way].whole < (1 - _GAIN) * self._times[best].whole:
                best = way
        tried = ", ".join(f"{way} {times.whole * 1e3:.3g} ms" for way, times in self._times.items())
        share = self._times[best].share
        short = f"; {share:.0%} of that is waiting for data" if share > _WAITS else ""
        why = f" (no processes: {self._limits.refusal})" if short and self._limits.refusal else ""
        self._decide(best, f"a step takes {tried}{short}{why}")


class Feed:
    """The batches of a run's epochs. ``close`` ends what loads them.

    Args:
        tell: is called once with how batches are loaded and why.
    """

    def __init__(self, loader: Loader, wanted: Wanted, limits: Limits, tell: Callable[[str], None] = lambda text: None) -> None:
        self._loader, self._tell = loader, tell
        self._search, self._limits = Search(wanted, limits), limits
        self._pool: Pool | None = None
        self._told = False
        #: bytes of the last batch
        self._size = 0
        #: of the last batch that this process loaded: seconds, and of a processor
        self._load_s = self._cpu_s = 0.0
        if wanted.workers:
            self._pool = self._start(wanted.workers)

    @property
    def way(self) -> Way:
        """In which batches are loaded at the moment."""
        return self._search.way

    def epoch(self, epoch: int, position: int = 0) -> Generator[Batch]:
        """The batches of ``epoch`` from ``position`` on, in the order of the sampler. A change of the way loses and repeats none."""
        parts = self._loader.sampler.epoch(epoch, position, self._loader.share)
        for first in parts:
            left = self._search.left
            rest = parts if left is None else itertools.islice(parts, left - 1)
            stretch = itertools.chain([first], rest)
            yield from self._try(epoch, list(stretch)) if self._is_trial else self._stretch(epoch, stretch)
            self._look()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def _is_trial(self) -> bool:
        """Whether processes load that nobody asked for, and that may turn out to be useless."""
        return bool(self._search.way.workers and not self._search.reason)

    def _try(self, epoch: int, parts: list[Slice]) -> Generator[Batch]:
        """``parts``, by processes as long as they can; from there on the rank loads, as it did before."""
        done, failed = 0, False
        with closing(self._load(epoch, parts)) as batches:
            timed = self._timed(batches)
            while not failed:
                try:
                    batch = next(timed, None)
                except Exception as error:
                    failed = True
                    self._refuse(error)
                else:
                    if batch is None:
                        return
                    done += 1
                    yield batch
        yield from self._stretch(epoch, parts[done:])

    def _stretch(self, epoch: int, parts: Iterable[Slice]) -> Generator[Batch]:
        with closing(self._load(epoch, parts)) as batches:
            yield from batches if self._search.reason else self._timed(batches)

    def _load(self, epoch: int, parts: Iterable[Slice]) -> Generator[Batch]:
        way = self._search.way
        if way.workers and self._pool is not None:
            return self._loader.by(self._pool, epoch, parts, way.prefetch)
        loader = (
            self._loader if self._search.reason else replace(self._loader, source=_Watched(self._loader.source, self._note))
        )
        return loader.within(epoch, parts, way.prefetch)

    def _timed(self, batches: Generator[Batch]) -> Generator[Batch]:
        asked = time.perf_counter()
        for batch in batches:
            got = time.perf_counter()
            yield batch
            done = time.perf_counter()
            if not self._search.reason:
                self._search.add(got - asked, done - got, self._load_s, self._cpu_s)
                self._size = _nbytes(batch.data)
            asked = time.perf_counter()

    def _look(self) -> None:
        """Between two stretches of steps: go on with the search."""
        search = self._search
        if search.wants:
            try:
                if self._pool is not None:
                    if self._pool.is_ready():
                        search.started(search.wants)
                elif refusal := self._refusal(search.wants):
                    search.refused(refusal)
                else:
                    self._pool = self._start(search.wants)
            except Exception as error:  # nobody has asked for processes: whatever keeps them from working ends nothing
                self._refuse(error)
        if search.reason and not self._told:
            self._told = True
            if not search.way.workers:
                self.close()
            self._tell(f"{search.way}; {search.reason}")

    def _start(self, count: int) -> Pool:
        return workers.start(self._loader.source, self._loader.sampler, self._loader.share, count)

    def _refuse(self, error: Exception) -> None:
        self.close()
        self._search.refused(error.message if isinstance(error, HvdtrainError) else f"{type(error).__name__}: {error}")

    def _refusal(self, count: int) -> str:
        """Why ``count`` processes cannot be tried; empty if they may be."""
        source, ranks = self._loader.source, self._limits.ranks
        size = workers.pickled_size(source)
        if size * ranks > _COPIES:
            return f"each would have its own copy of {size >> 20} MB of data"
        if isinstance(source, PoolSource) and (free := room()) is not None:
            batches = workers.EACH * count + self._search.depth + 2  # one is in the step, and one is fetched
            needed = ranks * batches * self._size
            if needed > _OF_ROOM * free:
                return f"their batches need {_mb(needed)} of shared memory, and /dev/shm has {_mb(free)} free"
        return ""

    def _note(self, load_s: float, cpu_s: float) -> None:
        self._load_s, self._cpu_s = load_s, cpu_s


@dataclass(frozen=True)
class _Watched:
    """A source that says how long each batch takes."""

    source: Source
    note: Callable[[float, float], None]

    def __len__(self) -> int:
        return len(self.source)

    def at_epoch(self, epoch: int) -> _Watched:
        return replace(self, source=at_epoch(self.source, epoch))

    def take(self, indices: object) -> object:
        began, worked = time.perf_counter(), time.thread_time()
        batch = self.source.take(indices)  # type: ignore[arg-type]
        self.note(time.perf_counter() - began, time.thread_time() - worked)
        return batch


def _number(option: str, text: str) -> int | None:
    if text == "auto":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"{option} must be auto or a whole number of 0 or more, got {text!r}", f"{option} auto, or {option} 2")


def _nbytes(data: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in leaves(data))


def _mb(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g} MB"
