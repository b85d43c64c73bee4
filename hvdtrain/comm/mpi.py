"""The communicator over MPI; the one home of mpi4py.

mpi4py initialises MPI with thread level MULTIPLE. Horovod finds it initialised, shares it, and leaves its end to
mpi4py, whose finalisation runs after Horovod's own exit handler.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Numbers, Op, Segment
from hvdtrain.comm.links import MpiLink
from hvdtrain.comm.mailbox import Mailbox
from hvdtrain.comm.shared import ALIGN
from hvdtrain.compression import Link
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import World


class MpiCommunicator:
    """Collectives on a duplicate of ``MPI.COMM_WORLD``, so that they never meet another library's messages."""

    def __init__(self, world: World) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise HvdtrainError(
                f"{world.source} started this rank, but mpi4py cannot be used: {error}",
                "pip install mpi4py, with the MPI of this launcher first in PATH and its library path; or run with --gloo",
            ) from None
        if (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank) != (world.size, world.rank):
            raise HvdtrainError(
                f"{world.source} says rank {world.rank} of {world.size}, MPI says rank {MPI.COMM_WORLD.rank} "
                f"of {MPI.COMM_WORLD.size}: mpi4py uses {MPI.Get_library_version().splitlines()[0]}",
                "use the launcher of that MPI (under Slurm: srun --mpi=pmix), or rebuild: pip install --force-reinstall mpi4py",
            )
        self._take(MPI, MPI.COMM_WORLD.Dup(), world)

    def _take(self, mpi: Any, comm: Any, world: World) -> None:
        self._mpi, self._comm = mpi, comm
        self._links: list[Any] = []
        self._closed_first: list[MpiCommunicator | Mailbox] = []
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        self.world = world.with_hosts(comm.allgather(self._host()))

    def _host(self) -> str:
        """The host's name, with its first rank: containers may have one name, and MPI knows who shares memory."""
        local = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = local.bcast(self._comm.rank, root=0)
        local.Free()
        return f"{socket.gethostname()}/{first}"

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        result = np.array(values, dtype=np.float64)
        self._comm.Allreduce(self._mpi.IN_PLACE, result, op=self._ops[op])
        return result

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        return self._comm.bcast(value, root=root)

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        result: list[Any] = self._comm.allgather(value)
        return result

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    @property
    def shares_memory(self) -> bool:
        return True

    def share(self, nbytes: int) -> Segment:
        """Collective. Memory of ``nbytes`` bytes of this rank's that all ranks of its host can read and write."""
        return _Window(self._mpi, self._comm, nbytes)

    def link(self) -> Link:
        whole = self._link_comm(self._comm.Dup())
        if not 1 < self.world.num_nodes < self.world.size:
            return MpiLink(whole, self._mpi)
        local = self._link_comm(self._comm.Split_type(self._mpi.COMM_TYPE_SHARED))
        leads = local.rank == 0
        leaders = self._comm.Split(0 if leads else self._mpi.UNDEFINED, self._comm.rank)
        levels = MpiLink(local, self._mpi), MpiLink(self._link_comm(leaders), self._mpi) if leads else None
        return MpiLink(whole, self._mpi, levels=levels)

    def lane(self) -> Link:
        return MpiLink(self._link_comm(self._comm.Split(self.world.local_rank, self._comm.rank)), self._mpi)

    def _link_comm(self, comm: Any) -> Any:
        self._links.append(comm)
        return comm

    def split(self, color: int, order: int) -> MpiCommunicator:
        comm = self._comm.Split(color, order)
        alone = replace(self.world, rank=comm.rank, size=comm.size, local_rank=0, local_size=1, node_rank=0, num_nodes=1)
        part = MpiCommunicator.__new__(MpiCommunicator)
        part._take(self._mpi, comm, alone)
        self._closed_first.append(part)
        return part

    def mailbox(self) -> Mailbox:
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise HvdtrainError(
                "messages between ranks need MPI with thread level MULTIPLE: it was initialised with less before mpi4py came",
                "import mpi4py.MPI first, or leave mpi4py.rc.thread_level at its default; with MPICH, one built for threads",
            )
        here = self._comm.allgather(self.world.node_rank)
        near = [node == self.world.node_rank for node in here]
        mailbox = Mailbox(self._link_comm(self._comm.Dup()), self._mpi, near)
        self._closed_first.append(mailbox)
        return mailbox

    def close(self) -> None:
        for part in self._closed_first:
            part.close()
        for comm in (*self._links, self._comm):
            comm.Free()


class _Window:
    """A shared window of MPI-3. The MPI does not copy: loads and stores of the ranks are the communication."""

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        local = comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.rank: int = local.rank
        self.ranks: list[int] = local.allgather(comm.rank)
        info = mpi.Info.Create()
        info.Set("alloc_shared_noncontig", "true")  # each part on pages of its own
        self._window = mpi.Win.Allocate_shared(nbytes + ALIGN, 1, info, comm=local)
        info.Free()
        buffers = [self._window.Shared_query(rank)[0] for rank in range(local.size)]
        # MPI puts its own counters first. All processes see a part at the same place within a page.
        self.parts = [memoryview(buffer)[-buffer.address % ALIGN :] for buffer in buffers]
        self.parts[self.rank][:4096] = bytes(4096)  # the counters of the meetings begin at 0
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._window.Sync()
        local.Barrier()
        local.Free()

    def fence(self) -> None:
        self._window.Sync()

    def free(self) -> None:
        self._window.Unlock_all()
        self._window.Free()
