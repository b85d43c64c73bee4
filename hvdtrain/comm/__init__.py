"""Collectives on small host values: metrics, votes, decisions. Gradients go their own way, in the adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Link
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import World

T = TypeVar("T")

#: a vector of numbers
Numbers = Sequence[float] | NDArray[np.float64]
Op = Literal["sum", "min", "max"]


class Segment(Protocol):
    """Raw memory that the ranks of a host share."""

    #: of each rank of this host, in order of their local ranks
    parts: list[memoryview]
    #: their ranks in the world
    ranks: list[int]
    #: this rank's place among them
    rank: int

    def fence(self) -> None:
        """Order this rank's reads and writes before it against those after it."""

    def free(self) -> None:
        """Collective over the host."""


@dataclass(frozen=True)
class Message:
    """Arrays, contiguous, and what the receiver needs to know of them: a plain value that JSON can hold."""

    about: Any = None
    arrays: Sequence[NDArray[Any]] = ()


class Post(Protocol):
    """Messages from rank to rank, on their way while the ranks compute. Shapes and types may be others each time."""

    def send(self, message: Message, to: int, tag: int) -> None:
        """Returns at once; the arrays must stay as they are until they have gone."""

    def expect(self, places: Sequence[tuple[int, int]]) -> None:
        """(source, tag) of the messages that ``receive`` will be asked for next, in this order: they may come in before."""

    def receive(self, source: int, tag: int, what: str) -> Message:
        """Waits for the next message of ``source`` with ``tag``. ``what`` it is: for those who look at a rank that waits."""

    def flush(self) -> None:
        """Wait until all that was sent has gone."""


class Communicator(Protocol):
    """What ranks agree with. Every method but ``abort`` is collective: all ranks call it, in the same order.

    ``name`` says what the call is for ("metrics/window"); it is shown when ranks wait for each other.
    """

    @property
    def world(self) -> World:
        """This rank, with its nodes known."""

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        """Collective. Combine a vector of numbers (the same length on every rank) over all ranks."""

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        """Collective. Give ``root``'s value, a small picklable object, to every rank."""

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        """Collective. Every rank's value, in rank order."""

    @property
    def shares_memory(self) -> bool:
        """Whether ``share`` can be called: over MPI."""

    def share(self, nbytes: int) -> Segment:
        """Collective. Memory of ``nbytes`` bytes of this rank's that all ranks of its host can read and write."""

    def link(self) -> Link:
        """Collective. A way for gradients of its own, which another thread may use at the same time; ``close`` ends it."""

    def lane(self) -> Link:
        """Collective. The same between the ranks of all hosts that have this rank's place on their hosts. Over MPI."""

    def split(self, color: int, order: int) -> Communicator:
        """Collective. The ranks with the same ``color``, sorted by ``order``. Over MPI, or for a single process."""

    def mailbox(self) -> Post:
        """Collective. Messages between any two of the ranks. Over MPI."""

    def abort(self, code: int) -> None:
        """End every rank of the job, now, with exit code ``code``. Does not return where there are other ranks."""

    def close(self) -> None:
        """Collective. Release what connecting took."""


def agree(comm: Communicator, decide: Callable[[], T], *, name: str) -> T:
    """Collective. Let the primary decide and every rank have its result, or raise its error."""
    outcome: tuple[T | None, HvdtrainError | None] = (None, None)
    if comm.world.is_primary:
        try:
            outcome = (decide(), None)
        except HvdtrainError as error:
            outcome = (None, error)
    result, failure = comm.broadcast(outcome, name=name)
    if failure is not None:
        raise failure.everywhere()
    return result  # type: ignore[no-any-return]
