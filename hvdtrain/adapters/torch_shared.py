"""Gradients summed in memory that the ranks of a host share; with most optimizers each rank updates its share alone.

What is one update on each rank otherwise is done once per host then: parameters are one copy in shared memory, and so is the
optimizer's state, as in ZeRO (arXiv 1910.02054) but without anything to gather.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapters import torch_fused
from hvdtrain.adapters.torch_exchange import Summed, sparse_weights
from hvdtrain.adapters.torch_state import is_dense
from hvdtrain.comm import Communicator
from hvdtrain.comm.shared import Field, HostMemory, HostSum, aligned, bytes_needed
from hvdtrain.compression import Link
from hvdtrain.errors import UsageError
from hvdtrain.progress import HERE
from hvdtrain.update import Update

#: Optimizers that update each element from its own gradient and state alone, so that parts can be updated apart.
ELEMENT_WISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_NUMBERS = 4
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Plan:
    """Where the optimizer's parameters lie in one flat array, and what is kept beside them."""

    parameters: list[torch.nn.Parameter]
    names: list[str]
    offsets: list[int]
    length: int
    dtype: Any
    #: per element: names in the optimizer's state that have the shape of the parameter
    slots: tuple[str, ...] = ()
    #: and those that are single numbers, with a value of each
    scalars: tuple[tuple[str, Any], ...] = ()
    #: why every rank updates everything; empty if each updates its share
    whole: str = ""

    def fields(self) -> list[Field]:
        count = len(self.parameters)
        fields = [Field(count + _NUMBERS, np.float64), Field(1, np.float64), Field(self.length, self.dtype)]
        if not self.whole:
            fields.append(Field(count * (1 + len(self.scalars)), np.float64, once=True))
            fields += [Field(self.length, self.dtype, once=True) for _ in ("parameters", *self.slots)]
        return fields

    def bytes_needed(self, ranks: int) -> int:
        """On one host."""
        fields = self.fields()
        return bytes_needed(fields, first=True) + (ranks - 1) * bytes_needed(fields, first=False)

    def view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """The part of ``flat`` that is parameter ``number``'s, in its shape and its order of elements."""
        parameter = self.parameters[number]
        return flat.as_strided(parameter.size(), parameter.stride(), self.offsets[number])


def plan(model: torch.nn.Module, optimizer: torch.optim.Optimizer, update: Update) -> Plan | str:
    """How ``optimizer``'s parameters can be shared, or why they cannot."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if sparse_weights(model):
        return "sparse gradients are gathered by Horovod"
    kinds = {parameter.dtype for parameter in parameters}
    if len(kinds) != 1 or not kinds <= set(_DTYPES):
        return "the parameters are not all float32 or all float64"
    for parameter in parameters:
        if not is_dense(parameter):
            return f"the memory of {names[id(parameter)]} has gaps"
    sizes = [aligned(parameter.numel()) for parameter in parameters]  # each begins on a cache line
    offsets = [0, *np.cumsum(sizes).tolist()]
    dtype = np.float32 if kinds == {torch.float32} else np.float64
    slots, scalars, whole = _state_of(optimizer, update)
    known = [names[id(parameter)] for parameter in parameters]
    return Plan(parameters, known, offsets[:-1], offsets[-1], dtype, slots, scalars, whole)


def _state_of(optimizer: torch.optim.Optimizer, update: Update) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...], str]:
    """What the optimizer keeps for a parameter, found out on a small one; or why it cannot update parts."""
    if type(optimizer) not in ELEMENT_WISE:
        return (), (), f"{type(optimizer).__name__} is not known to update each element by itself"
    if update.precision == "float16":
        return (), (), "the scaling of float16 looks at all gradients"
    if why := torch_fused.intercepted(optimizer):
        return (), (), why
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return (), (), "the optimizer is differentiable or capturable"
    slots: dict[str, None] = {}
    scalars: dict[str, Any] = {}
    for group in (group for group in optimizer.param_groups if group["params"]):
        stepped = next((each for each in group["params"] if each.dim() and optimizer.state.get(each)), None)
        known, shape = (optimizer.state[stepped], stepped.shape) if stepped is not None else (None, torch.Size([3]))
        if known is None:
            small = torch.nn.Parameter(torch.zeros(3, dtype=group["params"][0].dtype))
            small.grad = torch.ones_like(small)
            trial = _like(optimizer)
            trial.param_groups = [{**group, "params": [small]}]
            trial.step()
            known = trial.state[small]
        for name, value in known.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                slots[name] = None
            elif value is not None:
                scalars[name] = value
    return tuple(slots), tuple(scalars.items()), ""


def _like(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of the same kind and settings, without parameters, state or hooks."""
    other = copy.copy(optimizer)
    other.state, other.param_groups = defaultdict(dict), []
    return other


@dataclass(frozen=True)
class _Part:
    """What one rank updates of one parameter."""

    number: int
    place: slice
    parameter: torch.nn.Parameter
    gradient: torch.Tensor


class SharedExchange:
    """The ranks' gradients in shared memory. Made alike by all ranks, with the same ``plan``.

    While it lives, parameters and the optimizer's state are in that memory: one copy on each host, which nobody but
    ``update`` may change.
    """

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._plan, self._optimizer, self._comm = plan, optimizer, comm
        self._memory = HostMemory(comm.share, comm.world.local_rank, plan.fields())
        self._facts, self._squares, flats, *once = self._memory.arrays
        self._sum = HostSum(self._memory, flats)
        self._flat, self._sums = torch.from_numpy(self._sum.mine), torch.from_numpy(self._sum.sums)
        self._views = [plan.view(self._flat, number) for number in range(len(plan.parameters))]
        self._used = np.zeros(len(plan.parameters))
        self._is_sharded = not plan.whole
        #: to this rank's fellows on the other hosts, if there are any
        self._lane = comm.lane() if comm.world.num_nodes > 1 else None
        if self._is_sharded:
            self._share(once)

    def begin(self, passes: int) -> None:
        if self._is_sharded:
            self._refuse_changes()
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != len(self._plan.parameters):
            raise UsageError(
                "the optimizer has other parameters than when the training began", "--exchange horovod follows them"
            )

    def finish(self, numbers: Sequence[float]) -> Summed:
        row, count = self._facts[self._memory.rank], len(self._plan.parameters)
        found: list[Any] = [parameter.grad for parameter in self._plan.parameters]
        used = [grad is not None for grad in found]
        if all(used):
            torch._foreach_copy_(self._views, found)
        else:
            for view, grad in zip(self._views, found, strict=True):
                if grad is None:
                    view.zero_()
                else:
                    view.copy_(grad)
        row[:count] = used
        row[count : count + len(numbers)] = numbers
        self._memory.meet("the exchange of gradients with")
        if self._lane is None:
            sums = sum(self._facts[1:], self._facts[0].copy())
            squares = self._sum.add_share(spread=not self._is_sharded)
        else:
            sums = self._comm.allreduce(row, name="gradient/used")
            squares = self._add_over_hosts(self._lane)
        self._squares[self._memory.rank][0] = squares
        self._memory.meet("the sum of gradients with")
        whole = sum(float(part[0]) for part in self._squares)
        if self._lane is not None:  # hosts with other processors may round it otherwise
            (whole,) = self._comm.allreduce([whole / self._comm.world.size], name="gradient/norm").tolist()
        norm = math.sqrt(whole)
        self._used = sums[:count]
        for number, parameter in enumerate(self._plan.parameters):
            parameter.grad = self._views[number] if self._used[number] and not self._is_sharded else None
        return Summed(sums[count : count + len(numbers)].tolist(), norm)

    def gradients(self) -> list[torch.Tensor]:
        return [self._sums[self._sum.share] if self._is_sharded else self._flat]

    def update(self) -> None:
        if not self._is_sharded:
            torch_fused.step(self._optimizer)
            return
        for mine, theirs in zip(self._part_optimizer.param_groups, self._optimizer.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        for part in self._parts:
            part.parameter.grad = part.gradient if self._used[part.number] else None
        torch_fused.step(self._part_optimizer)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if self._fresh:
            self._move_in()
        self._memory.meet("the update of parameters with")

    def pause(self) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        mine = self._comm.world.rank == root
        for number, tensor in enumerate(tensors):
            array = self._comm.broadcast(tensor.numpy() if mine else None, name=f"state/{number}", root=root)
            if not mine:
                tensor.copy_(torch.from_numpy(array))

    def settle(self) -> None:
        if not self._is_sharded:
            return
        self._refuse_changes()
        for part in self._parts:
            if part.place.start == self._plan.offsets[part.number]:  # the rank that has the beginning speaks for it
                state = self._part_optimizer.state.get(part.parameter)
                values = [float(state.get(name, 0.0)) for name, _ in self._plan.scalars] if state else []
                self._numbers[part.number] = [1.0, *values] if state else 0.0
        self._memory.meet("the exchange of the optimizer's state with")
        for number, parameter in enumerate(self._plan.parameters):
            there, *values = self._numbers[number].tolist()
            if there:
                scalars = {name: _as(like, value) for (name, like), value in zip(self._plan.scalars, values, strict=True)}
                self._optimizer.state[parameter] = self._slot_views(number) | scalars
            else:
                self._optimizer.state.pop(parameter, None)
        self._memory.meet("the exchange of the optimizer's state with")

    def adopt(self) -> None:
        if not self._is_sharded:
            return
        for number, parameter in enumerate(self._plan.parameters):
            views, state = self._slot_views(number), self._optimizer.state.get(parameter, {})
            for name, view in views.items() if self._memory.rank == 0 else ():
                if isinstance(state.get(name), torch.Tensor):
                    view.copy_(state[name])
            if state:
                state.update({name: view for name, view in views.items() if name in state})
        self._memory.meet("the exchange of the optimizer's state with")
        self._part_optimizer.state.clear()
        #: parts whose state the optimizer has not made yet
        self._fresh: list[_Part] = []
        for part in self._parts:
            state = self._optimizer.state.get(self._plan.parameters[part.number])
            if not state:
                self._fresh.append(part)
                continue
            self._part_optimizer.state[part.parameter] = {
                name: self._slots[name][part.place] if name in self._slots else copy.copy(value)
                for name, value in state.items()
            }
        self._expected = self._versions()

    def close(self) -> None:
        self.settle()
        for parameter in self._plan.parameters:
            parameter.grad = None
            if self._is_sharded:
                parameter.data = parameter.data.clone()
                state = self._optimizer.state.get(parameter, {})
                state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})
        self._memory.meet("the end of the exchange with")

    def _add_over_hosts(self, lane: Link) -> float:
        """Collective. The same on every host, which adds up in the same order as the others."""
        self._sum.add_share(spread=False, squared=False)
        mine = self._sum.sums[self._sum.share]
        with HERE.waits("the sum of the gradients over hosts"):
            lane.sum(mine)
        if not self._is_sharded:
            self._sum.spread()
        return self._sum.squares()

    def _share(self, once: list[NDArray[Any]]) -> None:
        """Put parameters and state into the shared memory, and make an optimizer for this rank's part of them."""
        plan = self._plan
        self._numbers = once[0].reshape(len(plan.parameters), -1)
        values = torch.from_numpy(once[1])
        self._slots = {name: torch.from_numpy(array) for name, array in zip(plan.slots, once[2:], strict=True)}
        for number, parameter in enumerate(plan.parameters):
            if self._memory.rank == 0:
                plan.view(values, number).copy_(parameter.detach())
        self._memory.meet("the set-up of parameters with")
        for number, parameter in enumerate(plan.parameters):
            parameter.data = plan.view(values, number)
        self._parts = list(self._cut(values))
        of_number = {part.number: part.parameter for part in self._parts}
        numbers = {id(parameter): number for number, parameter in enumerate(plan.parameters)}
        self._part_optimizer = _like(self._optimizer)
        for group in self._optimizer.param_groups:
            own = [of_number[n] for n in (numbers[id(parameter)] for parameter in group["params"]) if n in of_number]
            self._part_optimizer.param_groups.append({**group, "params": own})
        self.adopt()

    def _cut(self, values: torch.Tensor) -> Iterator[_Part]:
        """This rank's share, parameter by parameter."""
        mine = self._sum.share
        for number, (start, parameter) in enumerate(zip(self._plan.offsets, self._plan.parameters, strict=True)):
            place = slice(max(start, mine.start), min(start + parameter.numel(), mine.stop))
            if place.start < place.stop:
                yield _Part(number, place, torch.nn.Parameter(values[place]), self._sums[place])

    def _move_in(self) -> None:
        """Keep in shared memory what the optimizer has made for parameters that it met for the first time."""
        for part in self._fresh:
            state = self._part_optimizer.state.get(part.parameter, {})
            for name in state.keys() & self._slots.keys():
                self._slots[name][part.place].copy_(state[name])
                state[name] = self._slots[name][part.place]
        self._fresh = [part for part in self._fresh if not self._part_optimizer.state.get(part.parameter)]

    def _slot_views(self, number: int) -> dict[str, torch.Tensor]:
        return {name: self._plan.view(slot, number) for name, slot in self._slots.items()}

    def _refuse_changes(self) -> None:
        """Raise UsageError if this rank has changed what all have one copy of. ``parameter.data`` is beyond what can be seen."""
        hint = "--exchange horovod gives each rank its own"
        if (versions := self._versions()) != self._expected:
            changed = next(n for n, (now, then) in enumerate(zip(versions, self._expected, strict=True)) if now != then)
            raise UsageError(
                f"{self._plan.names[changed]} was changed outside of the optimizer, and the ranks of a host hold one copy of it",
                hint,
            )
        if why := torch_fused.intercepted(self._optimizer):
            raise UsageError(f"{why} since the training began, and each rank updates its share alone", hint)

    def _versions(self) -> list[tuple[int, int]]:
        """Others after each change to a parameter that is not ``update``'s: of its values, or of where they are."""
        return [(parameter._version, parameter.data_ptr()) for parameter in self._plan.parameters]


def _as(like: Any, value: float) -> Any:
    return torch.tensor(value, dtype=like.dtype) if isinstance(like, torch.Tensor) else type(like)(value)
