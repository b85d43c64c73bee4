"""The first steps without compression: gradients change fastest there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Compressor, Floats, Link, State
from hvdtrain.compression.buckets import flat


class Warmup:
    """Plain sums for the first ``steps`` exchanges of each bucket, then ``inner``."""

    def __init__(self, inner: Compressor, steps: int) -> None:
        self.name = f"{inner.name} from step {steps} on"
        self._inner, self._steps = inner, steps
        self._done: dict[str, int] = {}
        self._before = 0  # steps done when the state was saved

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        done = self._done.get(key, self._before)
        self._done[key] = done + 1
        if done >= self._steps:
            self._inner.exchange(key, tensors, link)
        elif link.size > 1:
            link.sum(flat(tensors))

    def settle(self, link: Link) -> None:
        self._inner.settle(link)

    def state(self) -> State:
        done = max(self._done.values(), default=self._before)
        return self._inner.state() | {"warmup": np.array(done, np.int64)}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._done, self._before = {}, int(state.get("warmup", 0))
        self._inner.load(state, primary=primary)
