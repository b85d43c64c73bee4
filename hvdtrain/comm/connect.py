"""Choose the communicator that fits how the ranks were started."""

from __future__ import annotations

from hvdtrain.comm import Communicator
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.comm.watched import Watched
from hvdtrain.errors import UsageError
from hvdtrain.world import World


def connect(world: World, framework: str, *, again: bool = False) -> Communicator:
    """Collective. Connect the ranks of ``world``; ``framework`` is the adapter's, for jobs that have only Horovod.

    Args:
        again: this rank of an elastic job was connected before. Its new world may be another one.

    Raises:
        LeftOutError: an elastic job has no place for this rank any more.
        HvdtrainError: what the launcher needs (mpi4py, Horovod) is missing or belongs to another MPI.
    """
    if world.size == 1 and not world.elastic:
        return LocalCommunicator(world)
    if world.source == "torchrun":
        raise UsageError(
            "torchrun started these ranks; hvdtrain's ranks meet over Horovod and MPI",
            f"use: hvdtrain run -np {world.size} ..., horovodrun, mpirun or srun",
        )
    if world.source == "horovod":
        from hvdtrain.comm.horovod import HorovodCommunicator

        return Watched(HorovodCommunicator(world, framework, again=again))
    from hvdtrain.comm.mpi import MpiCommunicator

    return Watched(MpiCommunicator(world))
