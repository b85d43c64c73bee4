"""Gradients summed in memory that the ranks of a host share; with most optimizers each rank updates its share alone.

What is one update on each rank otherwise is done once per host then, as in ZeRO (arXiv 1910.02054) but without anything to
gather: the parameters of a host's ranks are one copy in shared memory. A rank's share of the optimizer's state is memory of its own,
which XLA updates in place; ``settle`` writes it where all ranks read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.adapters import keras_update
from hvdtrain.adapters.keras_state import unnumbered
from hvdtrain.adapters.keras_update import TracedUpdate
from hvdtrain.comm import Communicator
from hvdtrain.comm.shared import CHUNK_BYTES, Field, HostMemory, aligned, bytes_needed, share
from hvdtrain.compression import Link
from hvdtrain.consistency import check_values
from hvdtrain.errors import UsageError
from hvdtrain.progress import HERE
from hvdtrain.update import Update

#: Optimizers that update each element from its own gradient and state alone, so that parts can be updated apart.
ELEMENT_WISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Lion,
    keras.optimizers.Ftrl,
)
_CHUNK = CHUNK_BYTES // 4

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Where the optimizer's variables lie in one flat array, and what is kept beside them."""

    variables: list[Any]
    offsets: list[int]
    length: int
    #: attributes of the optimizer that have a variable for each of the model's, of its shape
    slots: tuple[str, ...] = ()
    #: of each variable, whether its weights decay
    decays: tuple[bool, ...] = ()
    #: why every rank updates everything; empty if each updates its share
    whole: str = ""

    def fields(self) -> list[Field]:
        fields = [Field(3, np.float64), Field(self.length)]
        return fields + [Field(self.length, once=True) for _ in ("parameters", *self.slots) if not self.whole]

    def bytes_needed(self, ranks: int) -> int:
        """On one host."""
        fields = self.fields()
        return bytes_needed(fields, first=True) + (ranks - 1) * bytes_needed(fields, first=False)

    def place(self, number: int) -> slice:
        return slice(self.offsets[number], self.offsets[number] + _count(self.variables[number]))


def layout(variables: Sequence[Any], optimizer: Any) -> Layout | str:
    """How the ``variables`` that ``optimizer`` was built for can be shared, or why they cannot."""
    for variable in variables:
        if variable.dtype != "float32":
            return f"{variable.path} is {variable.dtype}, and float32 is added"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"the gradient of {variable.path} is no gradient but its next value"
    whole = _whole(optimizer, variables)
    slots = () if whole else _slots(optimizer, variables)
    if slots is None:
        slots, whole = (), f"the state of {type(optimizer).__name__} is not one of elements"
    decays = [bool(optimizer._use_weight_decay(each.value)) for each in variables] if not whole else [True] * len(variables)
    # Weights that decay come first: a rank's share of them is one piece then.
    order = sorted(range(len(variables)), key=lambda number: not decays[number])
    offsets, length = [0] * len(variables), 0
    for number in order:
        offsets[number] = length
        length += aligned(_count(variables[number]))  # on cache lines, where TensorFlow takes memory over as it is
    return Layout(list(variables), offsets, length, slots, tuple(decays), whole)


def _whole(optimizer: Any, variables: Sequence[Any]) -> str:
    if type(optimizer) not in ELEMENT_WISE:
        return f"{type(optimizer).__name__} is not known to update each element by itself"
    for name in ("clipnorm", "global_clipnorm", "use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name):
            return f"{name} of {type(optimizer).__name__} looks at more than single elements"
    if [id(variable) for variable in optimizer._trainable_variables] != [id(variable) for variable in variables]:
        return f"{type(optimizer).__name__} was built for other variables"
    bound = next((variable for variable in variables if variable.constraint is not None), None)
    if bound is not None:
        return f"{bound.path} has a constraint"
    return ""


def _slots(optimizer: Any, variables: Sequence[Any]) -> tuple[str, ...] | None:
    """The attributes that have a variable for each of the model's; None if there is more state than that and single numbers."""
    shapes = [tuple(variable.shape) for variable in variables]
    own = {id(variable) for variable in optimizer.variables}
    found, rest = [], set(own)
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            rest.discard(id(value))
        elif isinstance(value, list) and value and all(id(each) in own and each.dtype == "float32" for each in value):
            if [tuple(each.shape) for each in value] != shapes:
                continue
            found.append(name)
            rest -= {id(each) for each in value}
    return None if rest else tuple(found)


class SharedExchange:
    """The ranks' gradients in shared memory. Made alike by all ranks, with the same ``layout``.

    From the first update on the parameters that get gradients are in that memory. What Keras assigns to them, or to the
    optimizer's state, is taken over with the next update. That state is whole, to be read, after ``settle`` only.
    """

    def __init__(self, layout: Layout, optimizer: Any, update: Update, comm: Communicator) -> None:
        self._layout, self._optimizer, self._update, self._comm = layout, optimizer, update, comm
        #: to this rank's fellows on the other hosts, if there are any
        self._lane = comm.lane() if comm.world.num_nodes > 1 else None
        self._scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._memory = HostMemory(comm.share, comm.world.local_rank, layout.fields())
        self._facts, self._flats, *once = self._memory.arrays
        self._row = self._facts[self._memory.rank]
        self._numbers = {id(variable): number for number, variable in enumerate(layout.variables)}
        self._parts: dict[tuple[int, ...], _Parts] = {}
        self._active: _Parts | None = None
        self._changed = False
        #: variables that are in shared memory now, and their tensors: held, so that nothing is written into them in place
        self._attached: dict[int, Any] = {}
        #: the parameters, then each slot of the optimizer: where they are shared, and their variables
        self._shared: list[tuple[Floats, list[Any]]] = []
        if not layout.whole:
            lists = [layout.variables, *(getattr(optimizer, name) for name in layout.slots)]
            self._shared = list(zip(once, lists, strict=True))
            for variable in (variable for variables in lists for variable in variables):
                object.__setattr__(variable, "_direct_assign", partial(self._assigned, variable))

    def numbers(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """What ``step`` calls them."""
        return tuple(self._numbers[id(variable)] for variable in variables)

    def joined(self, used: tuple[int, ...], gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the variables ``used`` as ``step`` takes them: flat, and small neighbours in one. To be traced."""
        result = []
        for place, members in _blocks(self._layout, used):
            pieces, at = [], place.start
            for position in members:
                start = self._layout.offsets[used[position]]
                pieces += [tf.zeros(start - at)] if start > at else []
                pieces.append(tf.reshape(gradients[position], [-1]))
                at = self._layout.place(used[position]).stop
            result.append(pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0))
        return result

    def step(self, used: tuple[int, ...], gradients: Sequence[Any], counted: float | None, scale: float) -> float:
        """Collective. Sum the gradients over the ranks, and apply them if they are finite.

        Args:
            used: the numbers of the variables, the same on all ranks.
            gradients: of them, ``joined``, already times what this rank counts for.
            counted: what this rank counts for, where only the sum over ranks is the whole; None elsewhere.
            scale: what the loss was multiplied with.

        Returns:
            the gradients' global norm, before it is clipped.
        """
        parts = self._parts.get(used)
        if parts is None:
            parts = self._parts[used] = _Parts(
                self._layout, used, self._memory.rank, self._flats, self._optimizer, self._update
            )
        own = [np.asarray(memoryview(gradient)) for gradient in gradients]
        parts.bring(own)
        self._row[0] = 0.0 if counted is None else counted
        self._row[1] = not self._layout.whole and (self._changed or self._active is not parts)
        self._memory.meet("the exchange of gradients with")
        if self._lane is None:
            facts = sum(self._facts[1:], self._facts[0].copy())
        else:
            facts = self._comm.allreduce(self._row, name="gradient/facts")
        if facts[1]:
            self._adopt(parts)
        factor = self._update.postscale
        if counted is not None:
            factor = factor / float(facts[0]) if facts[0] else 0.0
        self._row[2] = self._add(parts, own)
        self._memory.meet("the sum of gradients with")
        squares = sum(float(row[2]) for row in self._facts)
        if self._lane is not None:  # hosts with other processors may round it otherwise
            (squares,) = self._comm.allreduce([squares / self._comm.world.size], name="gradient/norm").tolist()
        norm = math.sqrt(squares) * factor / scale
        if math.isfinite(norm):
            parts.update(*keras_update.limits(self._update, norm, factor, scale))
            if not self._layout.whole:
                parts.publish(self._shared[0][0])
                self._memory.meet("the update of parameters with")
        elif self._scales:  # it leaves the update out by itself, and lowers the scale
            parts.update(factor, math.inf)
        return norm

    def settle(self, *, saving: bool = False) -> None:
        """Collective. Model and optimizer are whole on all ranks, to be read.

        Raises:
            UsageError: a variable was changed in a way that nobody saw.
        """
        if self._active is None:
            return
        self._active.write_state([array for array, _ in self._shared[1:]])
        self._memory.meet("the exchange of the optimizer's state with")
        for array, variables in self._shared:
            for number, variable in enumerate(variables):
                home = array[self._layout.place(number)]
                if id(variable) in self._attached and _value(variable).ctypes.data != home.ctypes.data:
                    raise UsageError(
                        f"{variable.path} was changed by other means than its assign(), and the ranks of a host hold one copy",
                        "--exchange horovod gives each rank its own",
                    )

    def close(self) -> None:
        """Collective. Give model and optimizer back as variables like any others."""
        self.settle()
        for _, variables in self._shared:
            for variable in variables:
                variable.__dict__.pop("_direct_assign", None)
                if id(variable) in self._attached:
                    variable.assign(_value(variable).reshape(variable.shape).copy())
        self._attached, self._active = {}, None
        self._memory.meet("the end of the exchange with")

    def _assigned(self, variable: Any, value: Any) -> None:
        """In place of the method that Keras' ``assign`` ends in."""
        if tf.inside_function():
            raise UsageError(
                f"{variable.path} is assigned inside a tf.function, and the ranks of a host hold one copy of it",
                "--exchange horovod gives each rank its own",
            )
        self._changed = True
        self._attached.pop(id(variable), None)
        type(variable)._direct_assign(variable, value)

    def _add(self, parts: _Parts, own: Sequence[Floats]) -> float:
        """Collective over hosts, which all add up in the same order. The sum of the squares of this rank's share."""
        if self._lane is None:
            return parts.add(own, spread=bool(self._layout.whole))
        parts.add(own, spread=False)
        with HERE.waits("the sum of the gradients over hosts"):
            return parts.add_over(self._lane, spread=bool(self._layout.whole))

    def _adopt(self, parts: _Parts) -> None:
        """Collective. What variables hold goes into shared memory, each rank's share of it, and ``parts`` begins with it.

        Raises:
            HvdtrainError: ranks have changed them otherwise than others.
        """
        if self._active is not None:
            self._active.write_state([array for array, _ in self._shared[1:]])
        self._memory.meet("the set-up of parameters with")
        self._compare()
        for array, variables in self._shared:
            for number, source, target in parts.inside:
                variable = variables[parts.used[number]]
                if id(variable) not in self._attached:
                    np.copyto(array[target], _value(variable)[source])
        self._memory.meet("the set-up of parameters with")
        for array, variables in self._shared:
            for number in parts.used:
                variable = variables[number]
                tensor = _tensor(array[self._layout.place(number)].reshape(variable.shape))
                variable._value.assign(tensor)
                self._attached[id(variable)] = tensor
        parts.begin([array for array, _ in self._shared])
        self._memory.meet("the set-up of parameters with")
        self._active, self._changed = parts, False

    def _compare(self) -> None:
        """Collective. Whether what was changed on any rank is the same on all: shared memory would hold a bit of each rank's."""
        kinds = ("model", *["optimizer"] * (len(self._shared) - 1))
        pairs = zip(kinds, self._shared, strict=True)
        variables = [(f"{kind}/{variable.path}", variable) for kind, (_, members) in pairs for variable in members]
        changed = [number for number, (_, variable) in enumerate(variables) if id(variable) not in self._attached]
        everyone = self._comm.allgather(changed, name="changed variables")
        numbers = sorted({number for theirs in everyone for number in theirs})
        names = list(unnumbered(name for name, _ in variables))
        check_values(((names[n], _value(variables[n][1])) for n in numbers), self._comm, hosts=())


class _Parts:
    """Who adds up and updates what, where the variables ``used`` get gradients."""

    def __init__(
        self, layout: Layout, used: tuple[int, ...], rank: int, flats: Sequence[Floats], optimizer: Any, update: Update
    ) -> None:
        self.used, self._layout, self._optimizer, self._update = used, layout, optimizer, update
        self._mine, self._others = flats[rank], [flat for place, flat in enumerate(flats) if place != rank]
        #: of the flat array, and whether weights in them decay; an optimizer without any would not count its steps
        self._pieces = list(_cut(layout, used, rank, len(flats))) or [(slice(0, 0), True)]
        #: this rank's share: the number of the variable, elements of it, their place in the flat array
        self.inside: list[tuple[int, slice, slice]] = []
        #: of the joined gradients: the number, elements of it, where they go or are added up
        self._outside: list[tuple[int, slice, Floats]] = []
        self._sums: list[tuple[int, slice, Floats, list[Floats]]] = []
        for number, which in enumerate(used):
            place = layout.place(which)
            for start, stop, is_mine in _split(place, self._pieces):
                if is_mine:
                    self.inside.append((number, _moved(start, stop, place.start), slice(start, stop)))
        for number, (place, _) in enumerate(_blocks(layout, used)):
            for start, stop, is_mine in _split(place, self._pieces):
                if not is_mine:
                    self._outside.append((number, _moved(start, stop, place.start), self._mine[start:stop]))
                    continue
                for first in range(start, stop, _CHUNK):
                    last = min(first + _CHUNK, stop)
                    theirs = [flat[first:last] for flat in self._others]
                    self._sums.append((number, _moved(first, last, place.start), self._mine[first:last], theirs))
        #: made with the first update
        self._apply: TracedUpdate | None = None
        self._gradients: list[Any] = []
        self._variables: list[Any] = []
        self._slots: list[list[Any]] = []
        #: the parameters after the last update, where it returns them
        self._updated: list[Any] = []

    def bring(self, own: Sequence[Floats]) -> None:
        """Let the other ranks have what they add up of this rank's gradients."""
        for number, source, target in self._outside:
            np.copyto(target, own[number][source])

    def add(self, own: Sequence[Floats], *, spread: bool) -> float:
        """Add up this rank's share, after a meeting; the sum of its squares. ``spread``: into every rank's array."""
        squares = 0.0
        with np.errstate(all="ignore"):
            for number, source, target, (first, *more) in self._sums:
                np.add(own[number][source], first, out=target)
                for other in more:
                    np.add(target, other, out=target)
                squares += float(np.dot(target, target))
                for other in (first, *more) if spread else ():
                    np.copyto(other, target)
        return squares

    def add_over(self, lane: Link, *, spread: bool) -> float:
        """Collective. Add to this rank's share of the sums those of other hosts; returns and spreads as ``add``."""
        squares = 0.0
        for place, _ in self._pieces:
            lane.sum(self._mine[place])
            for other in self._others if spread else ():
                np.copyto(other[place], self._mine[place])
            with np.errstate(all="ignore"):
                for first in range(place.start, place.stop, _CHUNK):
                    chunk = self._mine[first : min(first + _CHUNK, place.stop)]
                    squares += float(np.dot(chunk, chunk))
        return squares

    def update(self, factor: float, most: float) -> None:
        """Apply the sums times ``factor``, elements cut off at ``most``: to this rank's share, or to everything."""
        if self._apply is None:
            self._apply = self._of_everything()
        self._updated = self._apply(self._gradients, factor, most)

    def begin(self, arrays: Sequence[Floats]) -> None:
        """This rank's share of the parameters and of the optimizer's slots is as it is in shared memory."""
        if self._apply is None:
            self._apply = self._of_share()
        for array, variables in zip(arrays, [self._variables, *self._slots], strict=True):
            for (place, _), variable in zip(self._pieces, variables, strict=True):
                variable._value.assign(tf.constant(array[place]))

    def publish(self, parameters: Floats) -> None:
        """Let the other ranks have this rank's share of the parameters, after an update."""
        if not self._updated:
            self._write([parameters], [self._variables])
        for (place, _), tensor in zip(self._pieces, self._updated, strict=bool(self._updated)):
            np.copyto(parameters[place], np.asarray(memoryview(tensor)))

    def write_state(self, states: Sequence[Floats]) -> None:
        """And that of the optimizer's slots."""
        self._write(states, self._slots)

    def _write(self, arrays: Sequence[Floats], lists: Sequence[Sequence[Any]]) -> None:
        for array, variables in zip(arrays, lists, strict=True):
            for (place, _), variable in zip(self._pieces, variables, strict=True):
                np.copyto(array[place], _value(variable))

    def _of_share(self) -> TracedUpdate:
        """That of an optimizer of the same kind and settings for this rank's share, in one compiled function."""
        optimizer, decays = self._optimizer, [decays for _, decays in self._pieces]
        views = [self._mine[place] for place, _ in self._pieces]
        self._variables = [keras.Variable(np.zeros_like(view), name="share") for view in views]
        part = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.0})
        part.exclude_from_weight_decay([v.value for v, does in zip(self._variables, decays, strict=True) if not does])
        part.build(self._variables)
        # The number of the step, the learning rate and other single numbers are those of the model's own optimizer.
        for name, value in vars(optimizer).items():
            if isinstance(value, keras.Variable) or name == "_learning_rate":
                object.__setattr__(part, name, value)
        self._slots = [getattr(part, name) for name in self._layout.slots]
        self._gradients = [_tensor(view) if len(view) else tf.zeros([0]) for view in views]
        sizes = [len(view) for view in views]
        clips, is_small = self._update.clip_value is not None, sum(sizes) <= _CHUNK

        def apply(given: Any) -> Any:
            part.apply(given, self._variables)
            # Reading a variable is one more call, which takes longer than to copy little.
            return [tf.convert_to_tensor(variable.value) for variable in self._variables] if is_small else []

        return TracedUpdate(apply, sizes, clips=clips, jit_compile=True)

    def _of_everything(self) -> TracedUpdate:
        """That of the model's own optimizer, from the flat array."""
        variables = [self._layout.variables[number] for number in self.used]
        places = [self._layout.place(number) for number in self.used]
        self._gradients = [_tensor(self._mine)]
        clips = self._update.clip_value is not None
        return keras_update.of_flat(self._optimizer, variables, places, len(self._mine), clips=clips)


def _cut(layout: Layout, used: Sequence[int], rank: int, size: int) -> Iterator[tuple[slice, bool]]:
    """A rank's share of the variables ``used``: pieces of the flat array, and whether weights in them decay."""
    runs: list[tuple[int, int, bool]] = []
    for number in sorted(used, key=lambda number: layout.offsets[number]):
        start = layout.offsets[number]
        stop = start + aligned(_count(layout.variables[number]))
        if runs and runs[-1][1:] == (start, layout.decays[number]):
            start = runs.pop()[0]
        runs.append((start, stop, layout.decays[number]))
    mine, passed = share(sum(stop - start for start, stop, _ in runs), rank, size), 0
    for start, stop, decays in runs:
        first, last = max(mine.start - passed + start, start), min(mine.stop - passed + start, stop)
        if first < last:
            yield slice(first, last), decays
        passed += stop - start


def _blocks(layout: Layout, used: Sequence[int]) -> list[tuple[slice, list[int]]]:
    """The places of the gradients of the variables ``used``, and which of those lie there: small neighbours are one block."""
    blocks: list[tuple[slice, list[int]]] = []
    for position in sorted(range(len(used)), key=lambda position: layout.offsets[used[position]]):
        place = layout.place(used[position])
        if blocks:
            before, members = blocks[-1]
            is_next = before.start + aligned(before.stop - before.start) == place.start
            if is_next and place.stop - before.start <= _CHUNK:
                blocks[-1] = slice(before.start, place.stop), [*members, position]
                continue
        blocks.append((place, [position]))
    return blocks


def _split(place: slice, pieces: Sequence[tuple[slice, bool]]) -> Iterator[tuple[int, int, bool]]:
    """``place`` cut where ``pieces`` begin and end: start, stop, whether it is inside one."""
    at = place.start
    for piece, _ in pieces:
        start, stop = max(piece.start, at), min(piece.stop, place.stop)
        if start >= stop:
            continue
        if at < start:
            yield at, start, False
        yield start, stop, True
        at = stop
    if at < place.stop:
        yield at, place.stop, False


def _tensor(array: Floats) -> Any:
    """A tensor in the same memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _value(variable: Any) -> Floats:
    """A variable's elements where they are."""
    return np.asarray(memoryview(tf.raw_ops.ReadVariableOp(resource=variable._value.handle, dtype=tf.float32))).reshape(-1)


def _moved(start: int, stop: int, by: int) -> slice:
    return slice(start - by, stop - by)


def _count(variable: Any) -> int:
    return math.prod(variable.shape)
