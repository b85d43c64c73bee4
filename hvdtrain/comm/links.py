"""Links: what compressors of gradients send over, on MPI or on Horovod, from a thread of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link

#: Arrays of fewer bytes for each rank are summed by a tree: parts of a ring cost more by their number than by their size then.
_SMALL = 64 << 10
#: Bytes of a message, below Open MPI's eager limit over TCP (65,536 with its header). A larger one waits for an answer of its
#: receiver, which comes behind all that the receiver is sending itself: both ways at once, that is half of the link's speed.
_PIECE = 60 << 10
#: Pieces of a ring that may be on their way here at once.
_AHEAD = 64
#: While messages are on their way: so long giving the processor to others, then asleep in between.
_YIELD_S, _SLEEP_S = 2e-4, 1e-4


class LocalLink:
    """Of a single rank."""

    size, rank = 1, 0
    levels = None

    def sum(self, array: Floats) -> None:
        pass

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return parts.copy()

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[None].copy()


class MpiLink:
    """Over ``comm``, an mpi4py communicator that nobody else uses; ``mpi`` is the module ``mpi4py.MPI``.

    Messages are sent and awaited one by one: MPI's own collectives keep a core busy for as long as the network takes, which
    the backward pass needs, and their choice for gradients over TCP takes up to twice the time that the link does.
    """

    def __init__(self, comm: Any, mpi: Any, *, levels: tuple[Link, Link | None] | None = None) -> None:
        self._comm, self._mpi = comm, mpi
        self.size: int = comm.size
        self.rank: int = comm.rank
        self.levels = levels

    def sum(self, array: Floats) -> None:
        whole = array.reshape(-1)
        if self.size == 2:  # each sends all that it has: as many bytes as a ring, in one round
            self._add_the_other(whole)
        elif whole.nbytes < self.size * _SMALL:  # a tree has fewer rounds than a ring
            self._wait([self._comm.Iallreduce(self._mpi.IN_PLACE, whole, op=self._mpi.SUM)], Patience())
        else:
            self._ring([pieces(part) for part in np.array_split(whole, self.size)])

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return self._exchange(parts)

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._exchange(np.broadcast_to(array, (self.size, *array.shape)))

    def _add_the_other(self, array: NDArray[Any]) -> None:
        """Collective of two ranks. Both add the same two numbers, so they get the same bits."""
        mine, other = pieces(array), 1 - self.rank
        room = np.empty_like(array)
        theirs = pieces(room)
        coming = [self._comm.Irecv(piece, other) for piece in theirs]
        going = [self._comm.Isend(piece, other) for piece in mine]
        patience = Patience()
        for own, piece, received, sent in zip(mine, theirs, coming, going, strict=True):
            self._wait([received, sent], patience)
            own += piece

    def _ring(self, parts: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Collective. Sum over ranks, in place: as many parts as ranks, each in pieces.

        Each part goes around once to be added up and once more to be known by all: Patarasuk and Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", JPDC 2009. A piece goes on as soon as it has come and been added,
        so that the link is busy all the time.
        """
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        route = [
            (step, part, number)
            for step in range(2 * (self.size - 1))
            for part in [(self.rank - step - 1) % self.size]
            for number in range(len(parts[part]))
        ]
        room = np.empty((_AHEAD, parts[0][0].size), parts[0][0].dtype)
        coming: list[Any] = []
        sent = {(self.rank, number): self._comm.Isend(piece, right) for number, piece in enumerate(parts[self.rank])}
        patience = Patience()
        for done, (step, part, number) in enumerate(route):
            for later in range(len(coming), min(done + _AHEAD, len(route))):
                its_step, its_part, its_number = route[later]
                piece = parts[its_part][its_number]
                if its_step < self.size - 1:
                    piece = room[later % _AHEAD, : piece.size]
                else:  # where it comes to, it was sent from before
                    self._wait([sent[its_part, its_number]], patience)
                coming.append(self._comm.Irecv(piece, left))
            self._wait([coming[done]], patience)
            piece = parts[part][number]
            if step < self.size - 1:
                piece += room[done % _AHEAD, : piece.size]
            if step < 2 * self.size - 3:
                sent[part, number] = self._comm.Isend(piece, right)
        self._wait(list(sent.values()), patience)

    def _exchange(self, parts: NDArray[Any]) -> NDArray[Any]:
        """Collective. Row k to rank k, all at once."""
        got = np.empty(parts.shape, parts.dtype)
        got[self.rank] = parts[self.rank]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        requests = [self._comm.Irecv(piece, other) for other in reversed(others) for piece in pieces(got[other].reshape(-1))]
        requests += [self._comm.Isend(piece, other) for other in others for piece in pieces(parts[other].reshape(-1))]
        self._wait(requests, Patience())
        return got

    def _wait(self, requests: Sequence[Any], patience: Patience) -> None:
        while not self._mpi.Request.Testall(requests):
            patience.pause()


class Patience:
    """How one call waits: it gives the processor to others at first, and sleeps then."""

    def __init__(self) -> None:
        self._ends_at = time.perf_counter() + _YIELD_S

    def pause(self) -> None:
        if time.perf_counter() < self._ends_at:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)


def pieces(array: NDArray[Any]) -> list[NDArray[Any]]:
    """A flat array as messages."""
    size = _PIECE // array.itemsize
    return [array[first : first + size] for first in range(0, array.size, size)]


class HorovodLink:
    """Over ``hvd``, ``horovod.torch`` or ``horovod.tensorflow``, initialised.

    Args:
        to_tensor: from an array of float32 or bytes to one of the framework's tensors.
        in_place: whether a tensor shares its memory with its array, and can be reduced there.
    """

    levels = None

    def __init__(self, hvd: Any, to_tensor: Callable[[NDArray[Any]], Any], *, in_place: bool) -> None:
        self._hvd, self._to_tensor, self._in_place = hvd, to_tensor, in_place
        self.size: int = hvd.size()
        self.rank: int = hvd.rank()

    def sum(self, array: Floats) -> None:
        # Calls block, so a name is free again when it comes back. One for each size: Horovod remembers what ranks agreed on.
        options = {"op": self._hvd.Sum, "name": f"link/sum/{array.size}"}
        if self._in_place:
            self._hvd.allreduce_(self._to_tensor(array), **options)
        else:
            array[...] = self._hvd.allreduce(self._to_tensor(array), **options).numpy()

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        got = self._hvd.alltoall(
            self._to_tensor(parts.reshape(self.size, -1).view(np.uint8)), name=f"link/alltoall/{parts.nbytes}"
        )
        return _as(got.numpy(), parts.dtype, parts.shape)

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        row = array.reshape(1, -1).view(np.uint8)
        got = self._hvd.allgather(self._to_tensor(row), name=f"link/allgather/{array.nbytes}")
        return _as(got.numpy(), array.dtype, (self.size, *array.shape))


def _as(received: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    found: NDArray[Any] = received.reshape(-1).view(dtype).reshape(shape)
    return found
