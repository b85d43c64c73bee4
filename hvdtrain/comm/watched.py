"""Any communicator, with every collective noted where the watchdog and the last words find it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Communicator, Numbers, Op, Post, Segment
from hvdtrain.compression import Link
from hvdtrain.progress import HERE
from hvdtrain.world import World


class Watched:
    """Passes each call on to ``inner``."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    @property
    def world(self) -> World:
        return self._inner.world

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        with HERE.waits(f"allreduce of {name}"):
            return self._inner.allreduce(values, name=name, op=op)

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        with HERE.waits(f"broadcast of {name} by rank {root}"):
            return self._inner.broadcast(value, name=name, root=root)

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        with HERE.waits(f"allgather of {name}"):
            return self._inner.allgather(value, name=name)

    @property
    def shares_memory(self) -> bool:
        return self._inner.shares_memory

    def share(self, nbytes: int) -> Segment:
        with HERE.waits("memory that this host's ranks share"):
            return self._inner.share(nbytes)

    def link(self) -> Link:
        with HERE.waits("a link for gradients"):
            return self._inner.link()

    def lane(self) -> Link:
        with HERE.waits("a link for gradients"):
            return self._inner.lane()

    def split(self, color: int, order: int) -> Communicator:
        with HERE.waits("the making of groups of ranks"):
            return Watched(self._inner.split(color, order))

    def mailbox(self) -> Post:
        with HERE.waits("a mailbox for messages between ranks"):
            return self._inner.mailbox()

    def abort(self, code: int) -> None:
        self._inner.abort(code)

    def close(self) -> None:
        with HERE.waits("the end of the job"):
            self._inner.close()
