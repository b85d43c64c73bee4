"""Links: what compressors of gradients send over, on MPI or on Horovod, from a thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats


class LocalLink:
    """Of a single rank."""

    size, rank = 1, 0

    def sum(self, array: Floats) -> None:
        pass

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return parts.copy()

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return array[None].copy()


class MpiLink:
    """Over ``comm``, an mpi4py communicator that nobody else uses; ``mpi`` is the module ``mpi4py.MPI``."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm, self._mpi = comm, mpi
        self.size: int = comm.size
        self.rank: int = comm.rank

    def sum(self, array: Floats) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, array, op=self._mpi.SUM)

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        got = np.empty_like(parts)
        self._comm.Alltoall(_bytes(parts, self._mpi), _bytes(got, self._mpi))
        return got

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        got = np.empty((self.size, *array.shape), array.dtype)
        self._comm.Allgather(_bytes(array, self._mpi), _bytes(got, self._mpi))
        return got


class HorovodLink:
    """Over ``hvd``, ``horovod.torch`` or ``horovod.tensorflow``, initialised.

    Args:
        to_tensor: from an array of float32 or bytes to one of the framework's tensors.
        in_place: whether a tensor shares its memory with its array, and can be reduced there.
    """

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


def _bytes(array: NDArray[Any], mpi: Any) -> list[Any]:
    return [array, mpi.BYTE]


def _as(received: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    found: NDArray[Any] = received.reshape(-1).view(dtype).reshape(shape)
    return found
