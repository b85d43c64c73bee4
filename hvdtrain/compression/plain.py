"""No compression: sums as they are, by the link instead of Horovod.

Between hosts that is faster: see ``hvdtrain.comm.links.MpiLink`` and docs/performance_network.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import flat


class Plain:
    """Sums in float32. It remembers nothing."""

    name = "none"

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        link.sum(flat(tensors))

    def settle(self, link: Link) -> None:
        pass

    def state(self) -> State:
        return {}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        pass
