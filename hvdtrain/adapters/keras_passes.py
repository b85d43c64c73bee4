"""The passes of a piece of a Keras model: forward and back, as traced functions.

What the way back needs is kept in between. Where it is not (``recompute``), there is nothing but what came in, and the forward pass
is done once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.adapters.keras import as_float32
from hvdtrain.adapters.keras_layers import Chunk, Graph
from hvdtrain.adapters.keras_recorded import Recorded
from hvdtrain.adapters.keras_traced import Direct, Traced

#: a figure of (targets, outputs)
Figure = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Form:
    """What crosses a cut beside the values of tensors.

    Attributes:
        masks: of each value, whether it has a mask. Masks follow the values.
        penalized: whether the penalties before the cut, added up, come last. They go along like an activation: so the loss
            counts them, and their gradient finds the way back.
    """

    masks: tuple[bool, ...]
    penalized: bool

    @classmethod
    def of(cls, values: Sequence[Any], penalties: Sequence[Any]) -> tuple[Form, list[Any]]:
        """The form, and the tensors in it."""
        masks = [getattr(value, "_keras_mask", None) for value in values]
        form = cls(tuple(mask is not None for mask in masks), bool(penalties))
        return form, [*values, *(mask for mask in masks if mask is not None), *([tf.add_n(penalties)] if penalties else [])]

    def taken(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The values with their masks, and the penalties."""
        count = len(self.masks)
        rest = iter(tensors[count:])
        for value, is_masked in zip(tensors[:count], self.masks, strict=True):
            if is_masked:
                value._keras_mask = next(rest)
        return list(tensors[:count]), list(rest)


class Head:
    """What follows the last layer: the loss, and the other ``figures``. ``keeps``: an evaluation gives the outputs too."""

    def __init__(self, figures: Mapping[str, Figure], *, keeps: bool) -> None:
        self._figures, self._keeps = figures, keeps

    def learn(self, outputs: Any, penalties: Sequence[Any], targets: Any, part: Any) -> list[Any]:
        """The loss times ``part``, and means."""
        outputs = as_float32(outputs)
        loss = tf.cast(tf.reduce_mean(self._figures["loss"](targets, outputs)), tf.float32)
        loss = tf.add_n([loss, *penalties])
        return [loss * part, self._means(outputs, targets, loss)]

    def evaluate(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """The outputs, and means."""
        outputs = as_float32(outputs)
        return outputs if self._keeps else (), self._means(outputs, targets, self._figures["loss"](targets, outputs))

    def _means(self, outputs: Any, targets: Any, loss: Any) -> Any:
        found = [loss if name == "loss" else figure(targets, outputs) for name, figure in self._figures.items()]
        return tf.stack([tf.reduce_mean(tf.cast(value, tf.float32)) for value in found])


class _Function:
    """Traced; ``trace`` gets this object first, and sets the form of what comes out."""

    def __init__(self, trace: Callable[..., Any], make: Callable[..., Direct]) -> None:
        self.form: Form | None = None
        self.traced = Traced(partial(trace, self), make)


@dataclass(frozen=True)
class Given:
    """What a forward pass has to work on.

    Attributes:
        inputs: tensors in the ``form``, or those of a batch if there is none.
        part: what the loss counts for.
        seeds: of the chunk's random streams.
    """

    inputs: Any
    form: Form | None
    targets: Any
    part: float
    seeds: Any

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        return self.inputs, self.targets, tf.constant(self.part, tf.float32), self.seeds


@dataclass(frozen=True)
class Run:
    """A forward pass, to go back on.

    Attributes:
        kept: what ``function`` needs for that.
    """

    given: Given
    function: Recorded
    outputs: list[Any]
    kept: Any


class Passes:
    """Of one chunk.

    Args:
        trained: this rank's variables that are trained, by name.
        head: where the chunk ends the model.
    """

    def __init__(self, graph: Graph, chunk: Chunk, trained: Mapping[str, Any], head: Head | None) -> None:
        self._graph, self.chunk, self.head = graph, chunk, head
        own = {id(variable) for variable in chunk.variables}
        self._trained = {name: variable for name, variable in trained.items() if id(variable) in own}
        known = {id(variable) for variable in self._trained.values()}
        self._gathered = [variable for variable in chunk.variables if id(variable) not in known]
        self._functions: dict[tuple[bool, Form | None], _Function] = {}

    def evaluated(self, given: Given) -> Any:
        """What the head gives of a batch that is not learned from, or what crosses the cut, and its form."""
        function = self._function(given.form, training=False)
        found = function.traced(*given.arguments)
        return found if self.head is not None else (found, function.form)

    def learned(self, given: Given) -> tuple[list[Any], Form | None]:
        """The same in training: [loss, means] of the head. Nothing is kept for the backward pass."""
        function = self._function(given.form, training=True)
        return function.traced.flat(*given.arguments), function.form

    def recorded(self, given: Given) -> tuple[Run, Form | None]:
        """The same with what the backward pass needs."""
        function = self._function(given.form, training=True)
        direct, tensors = function.traced.ready(given.arguments)
        assert isinstance(direct, Recorded)
        outputs, kept = direct.forward(tensors)
        return Run(given, direct, outputs, kept), function.form

    def again(self, given: Given) -> Run:
        """Record a pass that has been done before: what layers gather has it already."""
        before = [variable.value.read_value() for variable in self._gathered]
        run, _ = self.recorded(given)
        for variable, value in zip(self._gathered, before, strict=True):
            variable.assign(value)
        return run

    def backward(self, run: Run, gradients: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Gradients of what came in, None where there is none; and of variables by name.

        Args:
            gradients: of what went out, or None.
        """
        found = run.function.backward(run.kept, gradients)
        if self.head is not None and not run.given.part:  # the loss is a mean over nothing, and may be no number
            found = [None if gradient is None else tf.zeros_like(gradient) for gradient in found]
        own = dict(zip(self._trained, found[len(found) - len(self._trained) :], strict=True))
        back = [] if run.given.form is None else found[: len(run.given.inputs)]
        return back, {name: gradient for name, gradient in own.items() if gradient is not None}

    def _function(self, form: Form | None, *, training: bool) -> _Function:
        key = training, form
        if key not in self._functions:
            trace = partial(self._trace, form=form, training=training)
            variables = [variable.value for variable in self._trained.values()]
            self._functions[key] = _Function(trace, partial(Recorded, variables=variables) if training else Direct)
        return self._functions[key]

    def _trace(
        self, into: _Function, inputs: Any, targets: Any, part: Any, seeds: Any, *, form: Form | None, training: bool
    ) -> Any:
        values, penalties = (self._graph.flat(inputs), []) if form is None else form.taken(inputs)
        outputs, more = self.chunk.run(values, seeds, training=training)
        penalties += more
        if self.head is None:
            into.form, crossing = Form.of(outputs, penalties)
            return crossing
        whole = self._graph.whole(outputs)
        return self.head.learn(whole, penalties, targets, part) if training else self.head.evaluate(whole, targets)
