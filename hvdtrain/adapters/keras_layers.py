"""A Keras model as the places of its graph: pieces of it can be run alone, and its variables get values where they are needed."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from tensorflow.python.eager import context as eager

from hvdtrain.adapters import keras_state
from hvdtrain.errors import UsageError

log = logging.getLogger(__name__)

#: where Keras keeps what a ``StatelessScope`` has left without a value, and its own random stream
_WITHOUT_VALUE, _STREAM, _SEED = "uninitialized_variables", "global_seed_generator", "global_random_seed"


class Chunk:
    """Neighbouring places of a graph, to run by themselves.

    Attributes:
        takes, gives: the graph's tensors that come in, and those that are to come out.
        variables: of its layers, without the states of random streams.
        streams: number of the place and number within it of each random stream, in the order of use.
    """

    def __init__(self, places: Sequence[tuple[int, Any]], takes: Sequence[Any], gives: Sequence[Any]) -> None:
        self._places, self.takes, self.gives = places, takes, gives
        self.variables = _unique(variable for _, node in places for variable in _variables(node))
        self.streams = [(number, place) for number, node in places for place, _ in enumerate(_generators(node))]
        #: those whose regularisers count here, and not where the same variables stand first
        self.regularized: list[Any] = []

    def run(self, values: Sequence[Any], seeds: Any, *, training: bool) -> tuple[list[Any], list[Any]]:
        """What comes out, and the penalties to add to the loss; to be traced. ``seeds``: a row for each of ``streams``."""
        known = {id(tensor): value for tensor, value in zip(self.takes, values, strict=True)}
        penalties: list[Any] = []
        seen = 0
        for _, node in self._places:
            layer = node.operation if isinstance(node.operation, keras.layers.Layer) else None
            if training:
                for generator in _generators(node):
                    generator.state.assign(tf.cast(seeds[seen], generator.state.dtype))
                    seen += 1
            arguments, options = node.arguments.fill_in(known)
            outputs = node.operation(*arguments, **options | ({} if layer is None else {"training": training}))
            known |= {id(tensor): value for tensor, value in zip(node.outputs, keras.tree.flatten(outputs), strict=True)}
            if training and layer is not None:
                weights = sum(variable.regularizer is not None for variable in layer.trainable_weights)
                losses = layer.losses
                penalties += losses[: len(losses) - weights]  # of activations, and what the layer adds; weights' are the last
        if training:
            penalties += [variable.regularizer(variable) for variable in self.regularized]
        return [known[id(tensor)] for tensor in self.gives], [tf.cast(penalty, tf.float32) for penalty in penalties]


class Graph:
    """The layers of a Sequential or functional model in the order of its summary; one that is called twice has two places.

    Args:
        make: makes the model. Its variables have shapes then, and no memory until ``fill``. Or a model that has all of it.

    Raises:
        UsageError: it is not such a model.
    """

    def __init__(self, make: Callable[[], Any] | Any) -> None:
        made: list[Any] = []
        if isinstance(make, keras.Model):
            self.model, self._given = make, None
        else:
            self.model, self._given, made = _made(make)
        self._functional = _functional(self.model)
        depths: dict[int, list[Any]] = self._functional._nodes_by_depth
        order = {id(operation): place for place, operation in enumerate(self._functional.operations)}
        #: an operation at each
        self.nodes: list[Any] = [
            node
            for depth in sorted(depths, reverse=True)
            for node in sorted(depths[depth], key=lambda node: order[id(node.operation)])
            if not node.is_input
        ]
        self.names: list[str] = [node.operation.name for node in self.nodes]
        #: of each place, the variables that no earlier one has
        self.first: list[list[Any]] = []
        seen: set[int] = set()
        for node in self.nodes:
            self.first.append([variable for variable in _variables(node) if id(variable) not in seen])
            seen |= {id(variable) for variable in self.first[-1]}
        known = _unique([*self.model.variables, *(variable for variables in self.first for variable in variables)])
        states = {id(generator.state) for generator in keras_state.generators(self.model)}
        known = [variable for variable in known if id(variable) not in states]
        #: by their names, which do not depend on how the model is split
        self.variables = dict(zip(keras_state.unnumbered(each.path for each in known), known, strict=True))
        own = states | {id(variable) for variable in known}
        if foreign := [variable.path for variable in made if id(variable) not in own]:
            log.warning(
                "%s is made with the model %r, and in none of its layers: it is not trained. A layer that is called on an array is "
                "computed at once; call it on what comes from an Input%s",
                foreign[0],
                self.model.name,
                f" (likewise {len(foreign) - 1} more)" if len(foreign) > 1 else "",
            )
        of_model = {id(variable) for variable in self.model.variables}
        #: ids
        self.trainable = {id(variable) for variable in self.model.trainable_variables}
        self.trainable |= {id(variable) for variable in known if variable.trainable and id(variable) not in of_model}

    @property
    def inputs(self) -> list[Any]:
        return list(self._functional.inputs)

    def flat(self, inputs: Any) -> list[Any]:
        """The inputs of a batch as the first place takes them."""
        found: list[Any] = self._functional._standardize_inputs(inputs)
        return found

    def whole(self, outputs: Sequence[Any]) -> Any:
        """What the model would return."""
        found = keras.tree.pack_sequence_as(self._functional._outputs_struct, list(outputs))
        return found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found

    def cut(self, first: int, end: int) -> Chunk:
        """The places from ``first`` to before ``end``. What crosses a cut are all tensors that are made before and used after."""
        chunk = Chunk(list(enumerate(self.nodes))[first:end], self._crossing(first), self._crossing(end))
        chunk.regularized = [
            variable
            for variables in self.first[first:end]
            for variable in variables
            if variable.regularizer is not None and id(variable) in self.trainable
        ]
        return chunk

    def alone(self, number: int) -> Chunk:
        """One place, with what it uses and makes itself."""
        node = self.nodes[number]
        return Chunk([(number, node)], _unique(node.input_tensors), node.outputs)

    def last_uses(self) -> dict[int, int]:
        """id of a tensor -> the last place that uses it; the number of places for what the model returns."""
        uses = {id(tensor): number for number, node in enumerate(self.nodes) for tensor in node.input_tensors}
        return uses | {id(tensor): len(self.nodes) for tensor in self._functional.outputs}

    def _crossing(self, number: int) -> list[Any]:
        if number == 0:
            return self.inputs
        if number == len(self.nodes):
            return list(self._functional.outputs)
        uses = self.last_uses()
        made = [*self._functional.inputs, *(tensor for node in self.nodes[:number] for tensor in node.outputs)]
        return _unique(tensor for tensor in made if uses.get(id(tensor), -1) >= number)

    def fill(self, numbers: Iterable[int], seed: int) -> None:
        """Give the variables of these places the values that the whole model would begin with, where they have none yet."""
        self._fill([variable for number in numbers for variable in _all_variables(self.nodes[number])], seed)
        self._given = None  # which may be as large as the model

    @contextlib.contextmanager
    def held(self, number: int) -> Iterator[None]:
        """With values for the variables of one place, which go again."""
        borrowed = [(each, each._initializer) for each in _all_variables(self.nodes[number]) if each._value is None]
        self._fill([variable for variable, _ in borrowed], 0)
        try:
            yield
        finally:
            for variable, initializer in borrowed:
                variable._value, variable._initializer = None, initializer

    def _fill(self, variables: Iterable[Any], seed: int) -> None:
        places = {id(variable): (n, place) for n, first in enumerate(self.first) for place, variable in enumerate(first)}
        with _streams_kept():
            for variable in _unique(variables):
                if variable._value is None:
                    place = places.get(id(variable), ())  # the states of random streams do not draw
                    drawn = int(np.random.SeedSequence([seed, *place]).generate_state(1)[0]) >> 1
                    _give_value(variable, self._given and self._given.get_current_value(variable), drawn)

    def layers(self, numbers: Iterable[int]) -> list[Any]:
        """The layers at these places, with those within them."""
        operations = [self.nodes[number].operation for number in numbers]
        layers = [each for each in operations if isinstance(each, keras.layers.Layer)]
        return _unique(each for layer in layers for each in layer._flatten_layers())


def _made(make: Any) -> tuple[Any, Any, list[Any]]:
    """The model, the scope that has the values which the function gave to some variables itself, and all the variables it made."""
    if not callable(make):
        raise UsageError(
            f"KerasPipeline needs a keras.Model or a function that makes one, got a {type(make).__name__}",
            "KerasPipeline(make, 'adam', loss=...), where make() returns keras.Sequential([...]) or keras.Model(inputs, outputs)",
        )
    before = list(global_state.get_global_attribute(_WITHOUT_VALUE) or ())
    scope = keras.StatelessScope(initialize_variables=False)
    try:
        with scope:
            model = make()
        made = list(global_state.get_global_attribute(_WITHOUT_VALUE) or ())[len(before) :]
    except ValueError as error:
        if "stateless scope" not in str(error):
            raise
        raise UsageError(
            f"the function that makes the model makes more than its layers: {str(error).splitlines()[0]}",
            "make optimizers and metrics elsewhere, do not compile the model; or give it as it is: KerasPipeline(make(), ...)",
        ) from error
    finally:
        global_state.set_global_attribute(_WITHOUT_VALUE, before)  # else the next such scope would give them all a value
    if not isinstance(model, keras.Model):
        raise UsageError(f"the function must make a keras.Model, it returned a {type(model).__name__}")
    return model, scope, made


def _functional(model: Any) -> Any:
    """The model's graph."""
    found = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    if found is None:
        raise UsageError(f"the model {model.name!r} is not built yet", "begin it with keras.Input(shape)")
    if not isinstance(found, Functional) or type(found).call is not Functional.call:
        raise UsageError(
            f"{type(model).__name__} is a class of its own, whose layers are known to its method call alone",
            "give a keras.Sequential, or keras.Model(inputs, outputs) of the layers: each of them may be a class of its own",
        )
    return found


def _give_value(variable: Any, given: Any, seed: int) -> None:
    initializer = variable._initializer
    if given is not None:
        variable._initializer = lambda shape, dtype=None: tf.cast(given, dtype)
    keras.utils.set_random_seed(seed)
    drawn = getattr(initializer, "seed", None)
    anew = getattr(initializer, "_init_seed", 0) is None  # it has drawn one itself, when it was made
    if anew:
        initializer.seed = seed
    try:
        variable._deferred_initialize()
    finally:
        if anew:
            initializer.seed = drawn


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    """All random streams go on afterwards where they are now."""
    context = eager.context()
    of_python, of_numpy, of_tensorflow = (
        random.getstate(),
        np.random.get_state(),
        (context._seed, getattr(context, "_rng", None)),
    )
    of_keras = [(name, global_state.get_global_attribute(name)) for name in (_STREAM, _SEED)]
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        context._seed, context._rng = of_tensorflow
        for name, value in of_keras:
            global_state.set_global_attribute(name, value)


def seeds(numbers: Sequence[int], streams: Sequence[tuple[int, int]]) -> Any:
    """A state for each of a chunk's ``streams``: it depends on ``numbers`` and the place in the whole model alone."""
    entropy = [number % (1 << 64) for number in numbers]
    rows = [np.random.SeedSequence([*entropy, *each]).generate_state(2, np.uint32) for each in streams]
    return tf.constant(np.array(rows, np.int64).reshape(len(rows), 2))


def next_number() -> int:
    """What Python's random stream gives next, as Keras' own seeds do; it goes on as if nobody had asked."""
    state = random.getstate()
    number = random.getrandbits(63)
    random.setstate(state)
    return number


def _generators(node: Any) -> list[Any]:
    layer = node.operation
    return keras_state.generators(layer) if isinstance(layer, keras.layers.Layer) else []


def _variables(node: Any) -> list[Any]:
    """A place's, without the states of random streams."""
    states = {id(generator.state) for generator in _generators(node)}
    return [variable for variable in _all_variables(node) if id(variable) not in states]


def _all_variables(node: Any) -> list[Any]:
    own = node.operation.variables if isinstance(node.operation, keras.layers.Layer) else []
    given = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))  # an operation on a weight of a layer
    return _unique([*own, *(each for each in given if isinstance(each, keras.Variable))])


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in objects}.values())
