"""The communicator of a single process: every collective is already done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Numbers, Op, Post, Segment
from hvdtrain.comm.links import LocalLink
from hvdtrain.compression import Link
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import World


@dataclass(frozen=True)
class LocalCommunicator:
    world: World

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        return value

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        return [value]

    @property
    def shares_memory(self) -> bool:
        return False

    def share(self, nbytes: int) -> Segment:
        raise HvdtrainError("a single process has nobody to share memory with")

    def link(self) -> Link:
        return LocalLink()

    def lane(self) -> Link:
        return LocalLink()

    def split(self, color: int, order: int) -> LocalCommunicator:
        return self

    def mailbox(self) -> Post:
        raise HvdtrainError("a single process has nobody to write to")

    def abort(self, code: int) -> None:
        pass

    def close(self) -> None:
        pass
