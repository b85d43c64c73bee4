"""The largest elements of each bucket alone, with error feedback.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018 (arXiv 1809.07599); Lin et al., "Deep Gradient
Compression", ICLR 2018 (arXiv 1712.01887), without its momentum correction, which needs the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import flat
from hvdtrain.compression.feedback import Residuals, forget_what_is_not_finite

DEFAULT_SHARE = 0.01
#: The next step's elements are looked for among those above this part of the smallest one of this step.
_SLACK = np.float32(0.7)


class TopK:
    """Sends the ``share`` of a bucket's elements that are largest, residual included, as pairs (index, value)."""

    def __init__(self, share: float = DEFAULT_SHARE) -> None:
        self.name = f"topk:{share:g}"
        self._share = share
        self._residuals = Residuals()
        self._thresholds: dict[str, np.float32] = {}

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        bucket = flat(tensors)
        owed = self._residuals.add_to(bucket, key)
        if link.size == 1:
            owed.fill(0)
            return
        count = max(1, round(self._share * bucket.size))
        indices = self._largest(key, bucket, count)
        pairs = np.empty((2, count), np.int32)
        pairs[0] = indices
        pairs[1] = bucket[indices].view(np.int32)
        owed[...] = bucket
        owed[indices] = 0
        forget_what_is_not_finite(owed)
        everyone = link.allgather(pairs)
        bucket.fill(0)
        for places, values in everyone:
            with np.errstate(invalid="ignore", over="ignore"):
                bucket[places] += values.view(np.float32)  # a rank names each place once

    def settle(self, link: Link) -> None:
        self._residuals.settle(link)

    def state(self) -> State:
        return self._residuals.state()

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        self._residuals.load(state, primary=primary)

    def _largest(self, key: str, bucket: Floats, count: int) -> NDArray[np.intp]:
        """Where the ``count`` largest absolute values are, in ascending order of places. NaN counts as largest."""
        sizes = np.abs(bucket)
        least = self._thresholds.get(key, np.float32(0))
        # If enough elements are not below a bound, the largest ones are among them, and few need be ordered.
        found = np.flatnonzero(~(sizes < least)) if least > 0 else np.arange(0)
        if found.size < count:
            found, values = np.arange(bucket.size), sizes
        else:
            values = sizes[found]
        chosen = np.argpartition(values, values.size - count)[values.size - count :]
        self._thresholds[key] = np.float32(values[chosen].min() * _SLACK)
        return np.sort(found[chosen])
