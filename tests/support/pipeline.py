"""The ranks of a pipeline as threads of one process. One of them runs at a time, until it waits for another.

So frameworks that are not made for several threads compute as they do in processes of their own, and ranks that would wait for
each other for ever are found out at once.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Message, Numbers, Op, Segment
from hvdtrain.world import World

T = TypeVar("T")


class Room:
    """What the threads meet in."""

    def __init__(self, size: int) -> None:
        self._turn = threading.Condition()
        self._alive = size
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.failure: BaseException | None = None
        self.values: defaultdict[tuple[Any, ...], dict[int, bytes]] = defaultdict(dict)
        self.messages: defaultdict[tuple[Any, ...], deque[tuple[str, list[NDArray[Any]]]]] = defaultdict(deque)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In a thread: nobody else runs, but while it waits."""
        with self._turn:
            try:
                yield
            except BaseException as error:
                self.failure = self.failure or error
                raise
            finally:
                self._alive -= 1
                self._look()

    def wait(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.failure is not None:
                raise RuntimeError("another rank has failed")
            self._waiting[rank] = what, ready
            self._look()
            if self.failure is None:
                self._turn.wait()
            self._waiting.pop(rank, None)
        self._turn.notify_all()

    def _look(self) -> None:
        if self._alive and len(self._waiting) == self._alive and not any(ready() for _, ready in self._waiting.values()):
            waits = ", ".join(f"rank {rank} for {what}" for rank, (what, _) in sorted(self._waiting.items()))
            self.failure = self.failure or RuntimeError(f"all wait: {waits}")
        self._turn.notify_all()


class Thread:
    """The communicator of one of the threads; ``name`` is that of the communicator."""

    def __init__(self, room: Room, world: World, members: Sequence[int], name: tuple[Any, ...] = ()) -> None:
        self._room, self.world, self._members, self._name = room, world, members, name
        self._met = 0

    @property
    def _me(self) -> int:
        return self._members[self.world.rank]

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        self._met += 1
        here = self._room.values[(*self._name, self._met)]
        here[self.world.rank] = pickle.dumps((name, value))
        self._room.wait(self._me, name, lambda: len(here) == self.world.size)
        names, values = zip(*[pickle.loads(here[rank]) for rank in range(self.world.size)], strict=True)
        assert len(set(names)) == 1, f"ranks meet for different things: {names}"
        return list(values)

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        everyone = np.array(self.allgather(np.array(values, np.float64), name=name))
        return {"sum": np.sum, "min": np.min, "max": np.max}[op](everyone, axis=0)

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        return self.allgather(value if self.world.rank == root else None, name=name)[root]

    def split(self, color: int, order: int) -> Thread:
        everyone = self.allgather((color, order, self.world.rank), name="split")
        mine = [rank for theirs, _, rank in sorted(everyone, key=lambda each: each[1:]) if theirs == color]
        world = World(rank=mine.index(self.world.rank), size=len(mine))
        return Thread(self._room, world, [self._members[rank] for rank in mine], (*self._name, self._met, color))

    def link(self) -> Sum:
        return Sum(self.split(0, self.world.rank))

    def mailbox(self) -> Box:
        return Box(self._room, self._me)

    @property
    def shares_memory(self) -> bool:
        return True

    def share(self, nbytes: int) -> Segment:
        raise NotImplementedError

    def lane(self) -> Sum:
        raise NotImplementedError

    def abort(self, code: int) -> None:
        raise RuntimeError(f"rank {self.world.rank} aborts with {code}")

    def close(self) -> None:
        pass


class Sum:
    """A link that adds."""

    levels = None

    def __init__(self, comm: Thread) -> None:
        self._comm, self.size, self.rank = comm, comm.world.size, comm.world.rank

    def sum(self, array: NDArray[np.float32]) -> None:
        array[...] = sum(self._comm.allgather(array, name="sum of a link"), np.zeros_like(array))

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return np.array([theirs[self.rank] for theirs in self._comm.allgather(parts, name="exchange of a link")])

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(self._comm.allgather(array, name="gathering of a link"))


class Box:
    """Messages, in the form in which they would travel."""

    def __init__(self, room: Room, me: int) -> None:
        self._room, self._me = room, me

    def send(self, message: Message, to: int, tag: int) -> None:
        assert all(array.flags.c_contiguous for array in message.arrays)
        self._room.messages[self._me, to, tag].append((json.dumps(message.about), [array.copy() for array in message.arrays]))

    def expect(self, places: Sequence[tuple[int, int]]) -> None:
        pass

    def receive(self, source: int, tag: int, what: str) -> Message:
        queue = self._room.messages[source, self._me, tag]
        self._room.wait(self._me, what, lambda: bool(queue))
        about, arrays = queue.popleft()
        return Message(json.loads(about), arrays)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def together(ranks: int, work: Callable[[Any], T]) -> list[T]:
    """What ``work``, of a communicator, returns on each of ``ranks``. The first error is raised here."""
    room, found = Room(ranks), [None] * ranks

    def run(rank: int) -> None:
        world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
        with contextlib.suppress(BaseException), room.inside():
            found[rank] = work(Thread(room, world, range(ranks)))  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if room.failure is not None:
        raise room.failure
    return found  # type: ignore[return-value]
