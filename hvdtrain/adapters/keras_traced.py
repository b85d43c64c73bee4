"""Steps that TensorFlow traces once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Traced:
    """A ``tf.function`` of (inputs, targets, ...) that leaves open the number of samples and each axis seen to vary.

    So a short last batch does not trace it anew, and sequences padded to another length do once.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature: list[Any] = []
        self._traced: Any = None
        #: shapes and types that the trace is known to take
        self._seen: set[tuple[Any, ...]] = set()
        #: how often it was traced
        self.traces = 0

    def __call__(self, *tensors: Any) -> Any:
        flat = tf.nest.flatten(tensors)
        key = tuple([(tensor.shape, tensor.dtype) for tensor in flat])
        if key not in self._seen:
            self._trace(tensors, [tf.TensorSpec(*each) for each in key])
            self._seen.add(key)
        if len(flat) == len(tensors):
            # What tf.function does with arguments before it calls takes as long as a small step (0.1 to 0.2 ms).
            return self._traced._call_flat(flat, self._traced.captured_inputs)
        return self._traced(*tensors)

    def _trace(self, tensors: tuple[Any, ...], given: list[Any]) -> None:
        if not self._signature:
            self._signature = [tf.TensorSpec((None, *spec.shape[1:]) if spec.shape.rank else (), spec.dtype) for spec in given]
        elif all(spec.is_subtype_of(known) for known, spec in zip(self._signature, given, strict=True)):
            return
        else:
            pairs = zip(self._signature, given, strict=True)
            self._signature = [known.most_specific_common_supertype([spec]) or spec for known, spec in pairs]
            self._seen.clear()
        self.traces += 1
        signature = tf.nest.pack_sequence_as(list(tensors), self._signature)
        # Without AutoGraph, as in Keras' own steps: it makes tracing slow, and fails on our calls between ranks.
        self._traced = tf.function(self._function, input_signature=signature, autograph=False).get_concrete_function()
