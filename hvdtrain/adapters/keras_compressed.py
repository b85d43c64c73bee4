"""Gradients that travel compressed: traced gradients, buckets in host memory, a traced update of what comes back.

Bucket after bucket is exchanged between the two traced functions. All gradients come at once from the first, so that there is
nothing left to compute meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.adapters import keras_update
from hvdtrain.comm import Communicator
from hvdtrain.compression import Compressor, Floats
from hvdtrain.compression.buckets import chunks
from hvdtrain.compression.feedback import handed
from hvdtrain.exchange import buckets
from hvdtrain.progress import HERE
from hvdtrain.update import Update


def refusal(variables: Sequence[Any]) -> str:
    """Why the gradients of ``variables`` cannot be compressed; empty if they can."""
    for variable in variables:
        if variable.dtype != "float32":
            return f"compressors take float32, and {variable.path} is {variable.dtype}"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"the gradient of {variable.path} is no gradient but its next value"
    return ""


class CompressedExchange:
    """The same work as ``SharedExchange``, over a link. Made alike by all ranks, with the same ``variables``."""

    def __init__(
        self,
        compressor: Compressor,
        variables: Sequence[Any],
        optimizer: Any,
        update: Update,
        comm: Communicator,
        bucket_mb: float,
    ) -> None:
        self._compressor, self._link, self._comm = compressor, comm.link(), comm
        self._variables, self._optimizer, self._update = list(variables), optimizer, update
        self._scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._limit = int(bucket_mb * (1 << 20))
        self._numbers = {id(variable): number for number, variable in enumerate(variables)}
        self._packed: dict[tuple[int, ...], _Packed] = {}

    def numbers(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """What ``step`` calls them."""
        return tuple(self._numbers[id(variable)] for variable in variables)

    def step(self, used: tuple[int, ...], gradients: Sequence[Any], counted: float | None, scale: float) -> float:
        """Collective. As ``SharedExchange.step``."""
        packed = self._packed.get(used)
        if packed is None:
            packed = self._packed[used] = _Packed(used, [self._variables[number] for number in used], self._limit)
        for view, gradient in zip(packed.views, gradients, strict=True):
            np.copyto(view, np.asarray(gradient))
        with np.errstate(all="ignore"):  # what is not finite is found in the norm
            for key, tensors in packed.buckets:
                with HERE.waits(f"the exchange of {key}, compressed"):
                    self._compressor.exchange(key, tensors, self._link)
            factor = self._update.postscale
            if counted is not None:
                (whole,) = self._comm.allreduce([counted], name="gradient/counted").tolist()
                factor = factor / whole if whole else 0.0
            norm = _norm(packed.flat) * factor / scale
        if math.isfinite(norm) or self._scales:  # which leaves out by itself what is not finite, and lowers the scale
            limits = keras_update.limits(self._update, norm, factor, scale) if math.isfinite(norm) else (factor, math.inf)
            packed.apply(self._optimizer, *limits, clips=self._update.clip_value is not None)
        return norm

    def settle(self, *, saving: bool = False) -> None:
        """Collective. ``saving``: rank 0's ``state`` is whole then."""
        if saving:
            self._compressor.settle(self._link)

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of what is remembered from step to step."""
        return self._compressor.state()

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from rank 0's ``state``."""
        self._compressor.load(state, primary=self._link.rank == 0)

    def sync(self, root: int) -> None:
        """Collective. All ranks go on from ``root``'s state, and owe what they owe."""
        state = handed(self.state()) if self._comm.world.rank == root else {}
        names: list[str] = self._comm.broadcast(sorted(state), name="exchange/names", root=root)
        self.load({name: self._comm.broadcast(state.get(name), name=f"exchange/{name}", root=root) for name in names})

    def close(self) -> None:
        """Collective. The link ends with the communicator."""


class _Packed:
    """The gradients of the variables with the numbers ``used``, in buckets that lie in one flat array, the last ones first."""

    def __init__(self, used: Sequence[int], variables: Sequence[Any], limit: int) -> None:
        order = list(reversed(range(len(used))))
        counts = [math.prod(variables[place].shape) for place in order]
        self.flat: Floats = np.zeros(sum(counts), np.float32)
        self._variables = variables
        self._places = [slice(0)] * len(used)
        #: in the order of ``used``, in the variables' shapes
        self.views: list[Floats] = [self.flat] * len(used)
        end = 0
        for place, count in zip(order, counts, strict=True):
            self._places[place] = slice(end, end + count)
            self.views[place] = self.flat[end : end + count].reshape(variables[place].shape)
            end += count
        #: A bucket's key, and the views in it. Layers may be frozen: what is owed by one bucket is none of another's.
        self.buckets: list[tuple[str, list[Floats]]] = []
        for group in buckets([4 * count for count in counts], limit):
            members = [order[each] for each in group]
            key = f"gradients {used[members[-1]]} to {used[members[0]]}"
            self.buckets.append((key, [self.views[place] for place in members]))
        self._update: Any = None

    def apply(self, optimizer: Any, factor: float, most: float, *, clips: bool) -> None:
        if self._update is None:
            self._update = keras_update.of_flat(optimizer, self._variables, self._places, len(self.flat), clips=clips)
        self._update([tf.constant(self.flat)], factor, most)


def _norm(flat: Floats) -> float:
    """In float64: it is the same on hosts that add up in another order, to all digits that count."""
    squares = 0.0
    for piece in chunks(0, flat.size):
        chunk = flat[piece].astype(np.float64)
        squares += float(np.dot(chunk, chunk))
    return math.sqrt(squares)
