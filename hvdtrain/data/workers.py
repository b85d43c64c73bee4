"""Processes that load, for sources that keep Python busy: threads would share one interpreter with the step.

They are started by a server process that was begun afresh ("forkserver"), never forked from the rank: MPI, Horovod and the
frameworks have threads and locks in it that a copy could wait for for ever. So a source has to be picklable.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.data.sampler import Sampler, Share, Slice
from hvdtrain.data.sources import Source, at_epoch, plain, take
from hvdtrain.errors import HvdtrainError, UsageError

#: Batches that a worker has been asked for and that are not fetched yet: one is loaded while another is sent.
EACH = 2
_LOOK_S = 0.1
_END_S = 1.0
#: for the thread that starts processes, once they are killed
_START_END_S = 5.0


class Pool(Protocol):
    """Processes that load batches in order."""

    def is_ready(self) -> bool:
        """Whether all can load. What kept them from starting is raised."""

    def batches(self, epoch: int, parts: Iterable[Slice]) -> Iterator[Any]:
        """The samples of ``parts``, in their order."""

    def close(self) -> None:
        """End them."""


@runtime_checkable
class PoolSource(Source, Protocol):
    """A source that brings processes of its own kind, whose batches lie in shared memory until the rank has used them."""

    def pool(self, sampler: Sampler, share: Share, count: int) -> Pool:
        """``count`` processes that load."""


def start(source: Source, sampler: Sampler, share: Share, count: int) -> Pool:
    """``count`` processes that load ``share`` of the batches of ``sampler``.

    Raises:
        UsageError: the source cannot be given to another process.
    """
    if isinstance(source, PoolSource):
        return source.pool(sampler, share, count)
    return Workers(source, sampler, share, count)


class WorkerError(Exception):
    """Where in a worker something was raised."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Failure:
    """What a worker raised, in a form that reaches the rank."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):  # SystemExit and the like are meant for the worker
            return cls(plain(error), trace)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(plain(error), trace)
        return cls(error, trace)

    def raised(self) -> Exception:
        """The error as it was raised, with the worker's traceback as its cause."""
        self.error.__cause__ = WorkerError(self.trace)
        return self.error


def payload(*values: Any) -> Packet:
    """What each worker gets: the source and its order.

    Raises:
        UsageError: it cannot be pickled.
    """
    with _travels():
        return Packet.of(values)


def pickled_size(*values: Any) -> int:
    """Bytes of what each worker gets, which are not kept.

    Raises:
        UsageError: it cannot be pickled.
    """
    counted = _Counted()
    with _travels():
        pickle.Pickler(counted, protocol=5, buffer_callback=counted.add).dump(values)
    return counted.nbytes


class _Counted:
    """A file that keeps nothing."""

    nbytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.nbytes += size
        return size

    def add(self, buffer: pickle.PickleBuffer) -> None:
        self.nbytes += buffer.raw().nbytes


@contextlib.contextmanager
def _travels() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"the data source cannot be given to loader processes: {type(error).__name__}: {error}",
            "define its class and its functions at the top of a module; or use --loader-workers 0",
        ) from None


@dataclass(frozen=True)
class Packet:
    """A pickled value whose arrays travel beside it, without a copy at this end (PEP 574)."""

    head: bytes
    arrays: Sequence[memoryview]

    @classmethod
    def of(cls, value: Any) -> Packet:
        found: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=found.append)
        return cls(head, [buffer.raw() for buffer in found])

    def send(self, to: Connection) -> None:
        to.send((self.head, [array.nbytes for array in self.arrays]))
        for array in self.arrays:
            while array:
                array = array[os.write(to.fileno(), array) :]


def receive(source: Connection) -> Any:
    """The value of the next packet. Its arrays are new and can be written to.

    Raises:
        EOFError: the other end is gone.
    """
    head, sizes = source.recv()
    arrays: list[Any] = [np.empty(size, np.uint8) for size in sizes]
    for array in arrays:
        rest = memoryview(array)
        while rest:
            count = os.readv(source.fileno(), [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
    return pickle.loads(head, buffers=arrays)


class Workers:
    """``count`` processes with a copy of the source each; batch *k* is loaded by process *k* modulo ``count``.

    They are told where a batch begins, and know by the sampler which samples that means.
    """

    def __init__(self, source: Source, sampler: Sampler, share: Share, count: int) -> None:
        self._count, self._closed = count, False
        self._lanes: list[_Lane] = []
        #: batches that were asked for and are not fetched
        self._waiting: deque[_Lane] = deque()
        self._error: Exception | None = None
        #: Held by who asks the processes or reads from them: the thread of a pass that was left may still wait for a batch.
        self._turn, self._pass = threading.Lock(), 0
        packet = payload(source, sampler, share)
        # A process that starts imports the recipe's modules, for seconds: meanwhile the training goes on.
        self._starter = threading.Thread(target=self._start, args=(packet,), name="hvdtrain-loader-start", daemon=True)
        self._starter.start()

    def is_ready(self) -> bool:
        if self._error is not None:
            raise self._error
        return not self._starter.is_alive()

    def batches(self, epoch: int, parts: Iterable[Slice]) -> Generator[Any]:
        self._starter.join()
        self.is_ready()
        lanes, parts = itertools.cycle(self._lanes), iter(parts)

        def ask() -> None:
            for part in itertools.islice(parts, 1):
                lane = next(lanes)
                lane.ask((epoch, part.position))
                self._waiting.append(lane)

        with self._turn:
            self._pass += 1
            number = self._pass
            while self._waiting:  # left over by a pass that was not ended
                self._waiting.popleft().receive()
            for _ in range(EACH * self._count):
                ask()
        while True:
            with self._turn:
                if self._pass != number or not self._waiting:
                    return
                result = self._waiting.popleft().receive()
                ask()
            if isinstance(result, Failure):
                raise result.raised()
            yield result

    def close(self) -> None:
        self._closed = True
        self._pass += 1
        for lane in self._lanes:
            lane.closed = True
        self._starter.join(_LOOK_S)
        mine = self._turn.acquire(timeout=_END_S)
        if self._starter.is_alive() or not mine:  # it writes to, or reads from, a process that does not
            for lane in self._lanes:
                lane.kill()
            self._starter.join(_START_END_S)
            mine = mine or self._turn.acquire(timeout=_START_END_S)
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.gone()
        if mine:
            self._turn.release()

    def _start(self, packet: Packet) -> None:
        try:
            for _ in range(self._count):
                self._lanes.append(lane := _Lane())
                if self._closed:
                    lane.kill()
                    return
            for lane in self._lanes:
                lane.closed = self._closed
                lane.give(packet)
            for lane in self._lanes:
                if isinstance(result := lane.receive(), Failure):
                    raise UsageError(
                        f"a loader process cannot read the data source: {type(result.error).__name__}: {result.error}",
                        "put its class into a module that can be imported; or use --loader-workers 0",
                    )
        except Exception as error:
            self._error = error


class _Lane:
    """One worker, as the rank sees it."""

    def __init__(self) -> None:
        self.closed = False
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_work, args=(there,), name="hvdtrain-loader", daemon=True
        )
        self._process.start()
        there.close()

    def give(self, packet: Packet) -> None:
        with self._named():
            packet.send(self._here)

    def ask(self, task: tuple[int, int] | None) -> None:
        with self._named():
            Packet.of(task).send(self._here)

    def receive(self) -> Any:
        while not self._here.poll(_LOOK_S):
            if self.closed:
                raise HvdtrainError("the loader processes are closed")
        with self._named():
            return receive(self._here)

    def end(self) -> None:
        with contextlib.suppress(HvdtrainError, OSError):
            self.ask(None)
        self._here.close()

    def kill(self) -> None:
        self._process.kill()

    def gone(self) -> None:
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise ended(self._process) from None


def ended(process: BaseProcess) -> HvdtrainError:
    """That ``process`` is gone, and how."""
    process.join(_END_S)
    code = process.exitcode
    if code is not None and code >= 0:
        how, hint = f" with exit code {code}", "what it has printed says more; --loader-workers 0 loads in the rank itself"
    else:
        how = f" by signal {-code}" if code else ""
        hint = "signal 9 is mostly the host's memory that ran out: use fewer --loader-workers; 0 loads in the rank itself"
    return HvdtrainError(f"a loader process ({process.pid}) ended{how}", hint)


def _work(rank: Connection) -> None:
    """A worker's life: until the rank says so, or is gone."""
    live_with_rank()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        if (loaded := _prepared(rank)) is not None:
            while (task := receive(rank)) is not None:
                answer(rank, loaded, task)


def _prepared(rank: Connection) -> Callable[[int, int], Any] | None:
    """What loads; None, when the rank is told why, if it cannot be read."""
    try:
        loaded = _loading(*receive(rank))
    except EOFError:
        raise
    except Exception as error:
        Packet.of(Failure.of(error)).send(rank)
        return None
    Packet.of(True).send(rank)
    return loaded


def answer(rank: Connection, loaded: Callable[[int, int], Any], task: tuple[int, int]) -> None:
    """Send what ``task`` gives, or what it raises."""
    try:
        packet = Packet.of(loaded(*task))
    except BaseException as error:
        packet = Packet.of(Failure.of(error))
    packet.send(rank)


def _loading(source: Source, sampler: Sampler, share: Share) -> Callable[[int, int], Any]:
    known: dict[int, Source] = {}

    def load(epoch: int, position: int) -> Any:
        if epoch not in known:
            known.clear()
            known[epoch] = at_epoch(source, epoch)
        return take(known[epoch], sampler.batch(epoch, position, share))

    return load


def live_with_rank(*_: Any) -> None:
    """In a worker: end when the rank has, also in the middle of a sample, and take no signal but SIGTERM of the rank itself.

    Schedulers send theirs to every process of a job, and the rank goes on until all ranks have agreed to stop.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # for threads that have it unblocked
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    rank = multiprocessing.parent_process()
    assert rank is not None

    def end() -> None:
        wait([rank.sentinel])
        os._exit(1)

    def listen() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank.pid:
            pass
        os._exit(128 + signal.SIGTERM)

    for watch in (end, listen):
        threading.Thread(target=watch, daemon=True).start()
