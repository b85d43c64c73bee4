"""The communicator over Horovod itself, for jobs without MPI (Gloo).

Horovod has no interface of its own for host values, so they travel as tensors of whichever framework the job uses.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Communicator, Numbers, Op, Post, Segment, driver, sockets
from hvdtrain.comm.links import HorovodLink
from hvdtrain.compression import Link
from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import require, start
from hvdtrain.world import World


class HorovodCommunicator:
    """Collectives through ``horovod.torch`` or ``horovod.tensorflow``.

    In an elastic job, ``world`` is a claim that the driver may have overtaken; the communicator's own is right. ``again``: this
    process was connected before.
    """

    def __init__(self, world: World, framework: str, *, again: bool = False) -> None:
        framework = _carrier() if framework == "numpy" else framework
        require(framework)
        if framework == "torch":
            import horovod.torch as hvd
            import torch

            to_tensor: Callable[[NDArray[Any]], Any] = torch.from_numpy
        else:
            import horovod.tensorflow as hvd
            import tensorflow as tf

            to_tensor = tf.constant
        self._connections: frozenset[str] = frozenset()
        if world.elastic:
            driver.meet(os.environ, again=again)
            before = sockets.opened()
            with driver.placed(os.environ):
                start.init(hvd)
            self._connections = sockets.opened() - before
            world = World.from_env()
        else:
            start.init(hvd)
        if (hvd.size(), hvd.rank()) != (world.size, world.rank):
            raise HvdtrainError(
                f"{world.source} says rank {world.rank} of {world.size}, Horovod says rank {hvd.rank()} of {hvd.size()}",
                "start the job with: hvdtrain run, or horovodrun",
            )
        self._hvd, self._to_tensor, self._shares_memory = hvd, to_tensor, framework == "torch"
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        self.world = world
        try:
            self.world = world.with_hosts(self.allgather(socket.gethostname(), name="hosts"))
        except Exception:
            self.close()  # a rank was lost at once: there may be a next try
            raise

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        tensor = self._to_tensor(np.array(values, dtype=np.float64))
        result: NDArray[np.float64] = self._hvd.allreduce(tensor, name=name, op=self._ops[op]).numpy()
        return result

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        return self._hvd.broadcast_object(value, root_rank=root, name=name)

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        result: list[Any] = self._hvd.allgather_object(value, name=name)
        return result

    @property
    def shares_memory(self) -> bool:
        return False

    def share(self, nbytes: int) -> Segment:
        raise HvdtrainError("Horovod over Gloo has no memory that ranks share", "run over MPI: leave --gloo out")

    def link(self) -> Link:
        return HorovodLink(self._hvd, self._to_tensor, in_place=self._shares_memory)

    def lane(self) -> Link:
        raise HvdtrainError("Horovod over Gloo has no links between single ranks", "run over MPI: leave --gloo out")

    def split(self, color: int, order: int) -> Communicator:
        raise HvdtrainError("groups of ranks need MPI, and the ranks meet over Gloo", "leave out --gloo")

    def mailbox(self) -> Post:
        raise HvdtrainError("messages between two ranks need MPI, and the ranks meet over Gloo", "leave out --gloo")

    def abort(self, code: int) -> None:
        # Gloo has no abort; the launcher ends the others when this rank is gone. Exit handlers would wait for them.
        os._exit(code)

    def close(self) -> None:
        self._hvd.shutdown()
        # Horovod leaves its connections open, and who waits there for this rank would wait until Gloo's patience ends.
        sockets.hang_up(self._connections)


def _carrier() -> str:
    """The framework whose tensors carry the values of a job that uses none itself."""
    try:
        require("torch")
    except HvdtrainError:
        return "tensorflow"
    return "torch"
