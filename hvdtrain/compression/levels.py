"""Compression between hosts only: within a host, memory is fast, and a sum costs less than a compressor does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from hvdtrain.compression import Compressor, Floats, Link, State
from hvdtrain.compression.buckets import flat


class BetweenHosts:
    """Sums within each host as they are, those sums between the first ranks of all hosts by ``inner``, then tells the host.

    On a link without levels it is ``inner``. What is owed is owed by hosts: only their first ranks remember anything.
    """

    def __init__(self, inner: Compressor) -> None:
        self.name = inner.name
        self._inner = inner

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        if link.levels is None:
            self._inner.exchange(key, tensors, link)
            return
        host, leaders = link.levels
        bucket = flat(tensors)
        host.sum(bucket)
        if leaders is None:
            bucket.fill(0)  # the sum that follows is then what the first rank has
        else:
            self._inner.exchange(key, tensors, leaders)
        host.sum(bucket)

    def settle(self, link: Link) -> None:
        if link.levels is None:
            self._inner.settle(link)
        elif link.levels[1] is not None:
            self._inner.settle(link.levels[1])

    def state(self) -> State:
        return self._inner.state()

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._inner.load(state, primary=primary)
