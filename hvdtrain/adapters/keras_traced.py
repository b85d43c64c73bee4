"""Steps that TensorFlow traces once, and a shorter way to call them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

try:
    from tensorflow.python.eager import execute
    from tensorflow.python.eager.polymorphic_function import atomic_function
except ImportError:  # another TensorFlow than this was written for
    execute = atomic_function = None


class Call:
    """``function``, one of TensorFlow's own kind, called without what TensorFlow does around a call.

    Raises:
        AttributeError, TypeError: this TensorFlow's are others.
    """

    def __init__(self, function: Any) -> None:
        if execute is None:
            raise AttributeError("there is no such way to call")
        self._function, self._context, self._name = function, function._bound_context, function.name.decode()
        self._count = len(function.function_type.flat_outputs)
        self._attributes = tuple(itertools.chain(*self._context.function_call_options.as_attrs().items()))

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        try:
            found: list[Any] = execute.execute(self._name, self._count, tensors, self._attributes, self._context)
        except tf.errors.OpError:
            with atomic_function.InterpolateRuntimeError(self._function):  # names the line of the model
                raise
        return found


class Direct:
    """``function``, of flat tensors as in ``signature``, traced at once and called without what TensorFlow does around a call.

    That looks at the arguments, at tapes that may record the call, and puts the result together: 0.4 ms beside a step that may
    take no more than that. Nothing records our calls, and arguments are as they were traced: whoever calls looks to that.
    """

    def __init__(self, function: Callable[..., Any], signature: Sequence[Any], *, jit_compile: bool = False) -> None:
        # Without AutoGraph, as in Keras' own steps: it makes tracing slow, and fails on our calls between ranks.
        traced = tf.function(function, input_signature=signature, autograph=False, jit_compile=jit_compile)
        #: holds the graph, and the variables in it
        self._concrete = traced.get_concrete_function()
        self._captured = list(self._concrete.captured_inputs)
        #: what TensorFlow's own call comes to; None where this TensorFlow has none of it
        self._inner: Any = None
        try:
            self._call = Call(self._concrete._inference_function)
            self._inner = self._concrete._inference_function
        except (AttributeError, TypeError):
            pass

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """What it returns, flat."""
        if self._inner is None:
            return list(tf.nest.flatten(self._concrete(*tensors)))
        return self._call([*tensors, *self._captured])

    def packed(self, flat: list[Any]) -> Any:
        """``flat`` in the form in which the function returned it."""
        if self._inner is None:
            return tf.nest.pack_sequence_as(self._concrete.structured_outputs, flat)
        return self._inner.function_type.pack_output(flat)


class Traced:
    """``function`` of (inputs, targets, ...), traced so that the number of samples and each axis seen to vary are left open.

    So a short last batch does not trace it anew, and sequences padded to another length do once.

    Args:
        make: a ``Direct`` of a function and its signature.
    """

    def __init__(
        self, function: Callable[..., Any], make: Callable[[Callable[..., Any], Sequence[Any]], Direct] = Direct
    ) -> None:
        self._function, self._make = function, make
        self._signature: list[Any] = []
        self._direct: Direct | None = None
        #: shapes and types that the trace is known to take; and the tensors of the last call, which often come again
        self._seen: set[tuple[Any, ...]] = set()
        self._last: list[Any] = []
        self._form: Any = None
        #: how often it was traced
        self.traces = 0

    def __call__(self, *tensors: Any) -> Any:
        """What the function returns."""
        found = self.flat(*tensors)
        assert self._direct is not None
        return self._direct.packed(found)

    def flat(self, *tensors: Any) -> list[Any]:
        """The tensors in what it returns."""
        direct, flat = self.ready(tensors)
        return direct(flat)

    def ready(self, tensors: tuple[Any, ...]) -> tuple[Direct, list[Any]]:
        """The function, traced for such ``tensors``, and they as it takes them."""
        flat = tf.nest.flatten(tensors)
        if len(flat) != len(tensors):
            self._same_form(tensors)
        if len(flat) != len(self._last) or not all(map(operator.is_, flat, self._last)):
            key = tuple([(tensor.shape, tensor.dtype) for tensor in flat])
            if key not in self._seen:
                self._trace(tensors, [tf.TensorSpec(*each) for each in key])
                self._seen.add(key)
            self._last = flat
        assert self._direct is not None
        return self._direct, flat

    def _same_form(self, tensors: tuple[Any, ...]) -> None:
        if self._form is None:
            self._form = tf.nest.map_structure(lambda _: 0, tensors)
        tf.nest.assert_same_structure(self._form, tensors)

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
        form = tf.nest.map_structure(lambda _: 0, tensors)
        self._direct = self._make(lambda *flat: self._function(*tf.nest.pack_sequence_as(form, flat)), self._signature)
