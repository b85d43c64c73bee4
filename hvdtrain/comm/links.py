"""Links: what compressors of gradients send over, on MPI or on Horovod, from a thread of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link

#: Parts of a ring that are smaller than this cost more by their number than by their size.
_SMALL = 64 << 10
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
        if whole.nbytes < self.size * _SMALL:  # a tree has fewer rounds than a ring
            self._wait([self._comm.Iallreduce(self._mpi.IN_PLACE, whole, op=self._mpi.SUM)])
            return
        # A ring: each part goes once around to be added up and once more to be known by all. Patarasuk and Yuan,
        # "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
        parts = np.array_split(whole, self.size)
        received = np.empty_like(parts[0])
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(self.size - 1):
            mine, other = parts[(self.rank - step) % self.size], parts[(self.rank - step - 1) % self.size]
            piece = received[: other.size]
            self._wait([self._comm.Irecv(piece, left), self._comm.Isend(mine, right)])
            other += piece
        for step in range(self.size - 1):
            mine, other = parts[(self.rank - step + 1) % self.size], parts[(self.rank - step) % self.size]
            self._wait([self._comm.Irecv(other, left), self._comm.Isend(mine, right)])

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return self._exchange(parts)

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._exchange(np.broadcast_to(array, (self.size, *array.shape)))

    def _exchange(self, parts: NDArray[Any]) -> NDArray[Any]:
        """Collective. Row k to rank k, all at once."""
        got = np.empty(parts.shape, parts.dtype)
        got[self.rank] = parts[self.rank]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        receive = [self._comm.Irecv(got[other], other) for other in reversed(others)]
        self._wait([*receive, *(self._comm.Isend(parts[other], other) for other in others)])
        return got

    def _wait(self, requests: list[Any]) -> None:
        ends_at = time.perf_counter() + _YIELD_S
        while not self._mpi.Request.Testall(requests):
            if time.perf_counter() < ends_at:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)


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
