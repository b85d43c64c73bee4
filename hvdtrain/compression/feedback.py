"""Error feedback: what a step could not send is added to the next one's gradient, so that nothing is lost, only late.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory",
NeurIPS 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compression import Floats, Link, State
from hvdtrain.compression.buckets import all_finite, chunks

_PREFIX = "residual/"
_KEPT = "kept/"


class Residuals:
    """For each bucket, what this rank has not sent yet."""

    def __init__(self) -> None:
        self._owed: dict[str, Floats] = {}

    def of(self, key: str, size: int) -> Floats:
        """The residual of a bucket of ``size`` elements, to be changed in place; zeros for one that is new or of another size."""
        found = self._owed.get(key)
        if found is None or found.size != size:
            found = self._owed[key] = np.zeros(size, np.float32)
        return found

    def add_to(self, flat: Floats, key: str) -> Floats:
        """Add what is owed to the bucket ``flat``; returns the residual, which the caller overwrites."""
        owed = self.of(key, flat.size)
        for piece in chunks(0, flat.size):
            flat[piece] += owed[piece]
        return owed

    def settle(self, link: Link) -> None:
        """Collective. Rank 0 owes what all owed together; the others nothing."""
        for key in sorted(self._owed):
            link.sum(self._owed[key])
            if link.rank:
                self._owed[key].fill(0)

    def state(self) -> State:
        return {_PREFIX + key: owed.copy() for key, owed in self._owed.items()}

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        found, before = {}, self._owed
        for name, value in state.items():
            if name.startswith(_PREFIX):
                found[name.removeprefix(_PREFIX)] = np.array(value if primary else np.zeros_like(value), np.float32)
            elif name.startswith(_KEPT):
                key, size = name.removeprefix(_KEPT), abs(int(value))
                own = before.get(key) if value > 0 else None
                found[key] = own if own is not None and own.size == size else np.zeros(size, np.float32)
        self._owed = found


def is_whole(state: Mapping[str, NDArray[Any]]) -> bool:
    """Whether ``state`` has what is owed itself."""
    return any(key.startswith(_PREFIX) for key in state)


def handed(state: Mapping[str, NDArray[Any]], *, keep: bool = True) -> State:
    """A rank's ``state`` for the other ones: they learn what is known alike, and which buckets there are, not what it owes itself.

    Args:
        keep: whether a rank that loads it goes on owing what it owes, or else nothing.
    """
    sizes = {
        _KEPT + key.removeprefix(_PREFIX): np.array(owed.size if keep else -owed.size, np.int64)
        for key, owed in state.items()
        if key.startswith(_PREFIX)
    }
    return sizes | {key: value for key, value in state.items() if not key.startswith(_PREFIX)}


def forget_what_is_not_finite(owed: Floats) -> None:
    """Set elements that are infinite or NaN to 0: added to the next gradient they would spoil every step to come."""
    if not all_finite(owed):
        owed[~np.isfinite(owed)] = 0
