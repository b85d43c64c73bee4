"""The optimizer's update as a traced function of its own, of gradients that were added up outside of TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.adapters.keras_traced import Direct
from hvdtrain.update import Update


class TracedUpdate:
    """Scales and clips flat gradients [sizes] and gives them to ``apply``.

    Args:
        apply: traced once; the optimizer's update, of tensors of ``sizes``. Calls return the tensors that it returns.
        clips: whether elements are cut off.
        jit_compile: whether XLA compiles it.
    """

    def __init__(
        self, apply: Callable[[list[Any]], Any], sizes: Sequence[int], *, clips: bool, jit_compile: bool = False
    ) -> None:
        def update(*tensors: Any) -> Any:
            *gradients, factor, most = tensors
            scaled = [gradient * factor for gradient in gradients]
            return apply([tf.clip_by_value(each, -most, most) for each in scaled] if clips else scaled)

        signature = [tf.TensorSpec((size,), tf.float32) for size in sizes] + [tf.TensorSpec((), tf.float32)] * 2
        self._direct = Direct(update, signature, jit_compile=jit_compile)
        self._scalars: dict[float, Any] = {}

    def __call__(self, gradients: Sequence[Any], factor: float, most: float) -> list[Any]:
        """Apply ``gradients``, tensors, times ``factor``, elements cut off at ``most``."""
        return self._direct([*gradients, self._scalar(factor), self._scalar(most)])

    def _scalar(self, value: float) -> Any:
        """It is nearly always one of two, and making a tensor takes longer than finding it."""
        if value not in self._scalars:
            if len(self._scalars) > 8:
                self._scalars.clear()
            self._scalars[value] = tf.constant(value, tf.float32)
        return self._scalars[value]


def of_flat(optimizer: Any, variables: Sequence[Any], places: Sequence[slice], size: int, *, clips: bool) -> TracedUpdate:
    """``optimizer``'s own update of ``variables``, whose gradients lie at ``places`` of one flat array of ``size`` elements."""

    def apply(flat: Sequence[Any]) -> None:
        pairs = zip(places, variables, strict=True)
        optimizer.apply([tf.reshape(flat[0][place], variable.shape) for place, variable in pairs], variables)

    return TracedUpdate(apply, [size], clips=clips)


def limits(update: Update, norm: float, factor: float, scale: float) -> tuple[float, float]:
    """What finite gradients of a global ``norm`` are multiplied with, and where their elements are cut off.

    Args:
        factor: what they are multiplied with anyway; ``norm`` has it already.
        scale: what the loss was multiplied with, which gradients still have and ``norm`` has not.
    """
    if update.clip_norm is not None and norm > update.clip_norm:
        factor *= update.clip_norm / norm
    return factor, math.inf if update.clip_value is None else update.clip_value * scale
