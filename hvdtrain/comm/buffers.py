"""Large host arrays over plain MPI, as its library does it by itself: what the benchmarks measure."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAUSE_S = 0.5e-3


class Buffers:
    """Sums and messages on a duplicate of ``MPI.COMM_WORLD``. For jobs whose communicator is over MPI."""

    def __init__(self) -> None:
        """Collective."""
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        #: name and version of the library
        self.library: str = " ".join(MPI.Get_library_version().split(",")[0].split())
        self._mark = np.zeros(1, np.int32)

    def sum(self, array: NDArray[Any]) -> None:
        """Collective. Sum ``array`` over all ranks, in place."""
        self._comm.Allreduce(self._mpi.IN_PLACE, array)

    def send(self, array: NDArray[Any], target: int) -> None:
        self._comm.Send(array, target)

    def receive(self, array: NDArray[Any], source: int) -> None:
        self._comm.Recv(array, source)

    def mark(self, target: int) -> None:
        """Send 4 bytes."""
        self._comm.Send(self._mark, target)

    def await_mark(self, source: int) -> None:
        self._comm.Recv(self._mark, source)

    def meet_asleep(self) -> None:
        """Collective. A barrier at which those who wait sleep: others may be measuring on the same cores."""
        request: Any = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Collective."""
        self._comm.Free()
