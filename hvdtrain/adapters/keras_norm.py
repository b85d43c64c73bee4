"""Batch normalisation over the samples of all ranks, in layers of Keras' own class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

Reduce = Callable[[Any, str], Any]


def layers(model: Any) -> list[Any]:
    """Every batch normalisation in ``model``, at any depth, in the same order on every rank."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


class SyncedMoments:
    """Gives ``chosen`` layers the mean and the variance over all ranks, in the forward and the backward pass.

    Only the method that computes the moments is replaced, on the instance, so that a model is saved as ever and loads
    without us. Every rank must run every layer in every step, without samples too, and scale its loss before the
    backward pass (or say its ``part``): gradients with respect to the shared moments are added up over ranks inside it.
    """

    def __init__(self, chosen: Sequence[Any], reduce: Reduce, rank: int, size: int) -> None:
        self._reduce, self._rank, self._size = reduce, rank, size
        #: whether this rank's samples count; if not, what its loss sends back is left out, be it NaN
        self.active: Any = True
        #: whether they are samples at all, and no row that fills an empty part
        self.present: Any = True
        #: what this rank's gradients are multiplied with after the backward pass; 1 where the loss is weighted before
        self.part: Any = 1.0
        self._calls = 0
        self._chosen = list(chosen)
        for number, layer in enumerate(chosen):
            object.__setattr__(layer, "_moments", partial(self._moments, number, layer))

    def detach(self) -> None:
        """Give the layers back as they were."""
        for layer in self._chosen:
            layer.__dict__.pop("_moments", None)

    def begin(self) -> None:
        """A trace begins: the collectives of its layers are named anew, as on every other rank."""
        self._calls = 0

    def _moments(self, number: int, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        self._calls += 1
        axes, width = layer._reduction_axes, inputs.shape[layer.axis]
        if mask is None:
            counted = tf.cast(tf.size(inputs) // width, inputs.dtype)
            keep = None
        else:
            keep = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))
            counted = tf.reduce_sum(tf.cast(mask, inputs.dtype))
        counted *= tf.cast(self.present, inputs.dtype)

        def total(values: Any) -> Any:
            return tf.reduce_sum(values if keep is None else tf.where(keep, values, tf.zeros_like(values)), axes)

        mean = total(inputs) / tf.maximum(counted, 1)
        shape = [1] * len(inputs.shape)
        shape[layer.axis] = width
        spread = total(tf.square(inputs - tf.reshape(mean, shape)))
        row = tf.concat([tf.stop_gradient(tf.reshape(counted, [1])), mean, spread], 0)
        counts, means, spreads = tf.split(self._gather(row, f"norm.{number}.{self._calls}"), [1, width, width], axis=1)
        # Chan, Golub and LeVeque, "Updating formulae", 1979: parts merge without the cancellation of sums of squares.
        everything = tf.maximum(tf.reduce_sum(counts), 1)
        whole = tf.reduce_sum(counts * means, 0) / everything
        return whole, (tf.reduce_sum(spreads, 0) + tf.reduce_sum(counts * tf.square(means - whole), 0)) / everything

    def _gather(self, row: Any, name: str) -> Any:
        """The rows of all ranks; one small reduction each way."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gathered(row: Any) -> Any:
            table = self._reduce(tf.pad(row[None], [[self._rank, self._size - 1 - self._rank], [0, 0]]), name)

            def back(gradient: Any) -> Any:
                gradient = tf.where(self.active, gradient, tf.zeros_like(gradient))
                # Other ranks' gradients count for another part than this one's, which is multiplied with its own later.
                part = tf.cast(self.part, gradient.dtype)
                return self._reduce(gradient * part, f"{name}.back")[self._rank] / part

            return table, back

        return gathered(row)
