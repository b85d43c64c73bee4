"""Traced functions whose way back is gone later, and as often as there are calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.adapters.keras_traced import Call, Direct

#: TensorFlow's name for what a tape that is asked once needs
_FIRST_ORDER = 1


class Recorded(Direct):
    """Also gives gradients, of floating point arguments and of ``variables``, TensorFlow's.

    A tape gives them too, and takes as long about it as a small model about its passes: 2 ms, of which the passes are 0.6.
    """

    def __init__(self, function: Callable[..., Any], signature: Sequence[Any], *, variables: Sequence[Any]) -> None:
        super().__init__(function, signature)
        self._variables = variables
        self._halves: _Halves | None = None
        self._is_known = False

    def forward(self, tensors: list[Any]) -> tuple[list[Any], Any]:
        """What it returns, flat; and what ``backward`` needs."""
        if not self._is_known:
            self._halves, self._is_known = _halves(self._concrete, tensors, self._variables), True
        if self._halves is not None:
            return self._halves.forward(tensors)
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in tensors if tensor.dtype.is_floating])
            outputs = list(tf.nest.flatten(self._concrete(*tensors)))
        return outputs, (tape, tensors, outputs)

    def backward(self, kept: Any, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the arguments and of the variables; None where there is none.

        Args:
            gradients: of what ``forward`` returned; None where there is none.
        """
        if self._halves is not None:
            return self._halves.backward(kept, gradients)
        tape, tensors, outputs = kept
        targets = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
        sources = [*floats, *self._variables]
        if not targets or not sources:
            return [None] * (len(tensors) + len(self._variables))
        found = tape.gradient([each for each, _ in targets], sources, output_gradients=[gradient for _, gradient in targets])
        rest = iter([None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found])
        return [next(rest) if tensor.dtype.is_floating else None for tensor in tensors] + list(rest)


class _Halves:
    """The two functions that TensorFlow makes of one for a tape, called without the tape.

    Raises:
        AttributeError, TypeError: this TensorFlow makes others.
    """

    def __init__(self, concrete: Any, tensors: Sequence[Any], variables: Sequence[Any]) -> None:
        self._captured = list(concrete.captured_inputs)
        outputs = list(concrete.outputs)  # those that the other half needs are added to them
        pair = concrete._select_forward_and_backward_functions([*tensors, *self._captured], _FIRST_ORDER, True)
        forward, _ = pair.forward()
        backward, graph = pair._functions._backward, pair._functions._forward_graph
        #: holds their graphs
        self._pair = pair
        self._forward, self._count = Call(forward), len(outputs)
        #: the outputs that the other half takes gradients of
        self._differentiable = [place for place, output in enumerate(outputs) if output.dtype.is_floating]
        places = {id(output): place for place, output in enumerate(graph.outputs)}
        captured = list(backward.captured_inputs)
        #: what else it takes: the place of an output of the first half, or a tensor that is always the same
        self._taken = [(places.get(id(tensor)), tensor) for tensor in captured]
        if len(backward.inputs) != len(self._differentiable) + len(captured):
            raise TypeError("the way back takes other gradients")
        self._backward = Call(backward._inference_function) if backward.outputs else None
        places_back, at = [], 0
        for gradient in backward.structured_outputs:
            parts = (
                []
                if gradient is None
                else [part for part in tf.nest.flatten(gradient, expand_composites=True) if part is not None]
            )
            places_back.append((gradient, slice(at, at + len(parts))))
            at += len(parts)
        handles = [id(tensor) for tensor in self._captured]
        of_variables = [
            places_back[len(tensors) + handles.index(id(variable.handle))]
            if id(variable.handle) in handles
            else (None, slice(0))
            for variable in variables
        ]
        #: of each argument and variable: the form of its gradient, and its tensors among what the second half returns
        self._found = [*places_back[: len(tensors)], *of_variables]

    def forward(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = self._forward([*tensors, *self._captured])
        return outputs[: self._count], outputs

    def backward(self, kept: list[Any], gradients: Sequence[Any]) -> list[Any]:
        if self._backward is None or all(gradient is None for gradient in gradients):
            return [None] * len(self._found)
        given = [tf.zeros_like(kept[place]) if gradients[place] is None else gradients[place] for place in self._differentiable]
        found = self._backward([*given, *(tensor if place is None else kept[place] for place, tensor in self._taken)])
        return [None if form is None else _packed(form, found[places]) for form, places in self._found]


def _packed(form: Any, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.convert_to_tensor(tf.nest.pack_sequence_as(form, parts, expand_composites=True))  # of rows of an embedding


def _halves(concrete: Any, tensors: Sequence[Any], variables: Sequence[Any]) -> _Halves | None:
    """None where this TensorFlow has none of it."""
    try:
        return _Halves(concrete, tensors, variables)
    except (AttributeError, TypeError):
        return None
