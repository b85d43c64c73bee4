"""How long a schedule takes, who waits and what is stored: instructions done on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.pipeline.schedule import Instruction, Name, home, schedule, virtual


class SimulationError(AssertionError):
    """Instructions that wait for ever, or a message that nobody receives."""


@dataclass(frozen=True)
class Costs:
    """Seconds that one micro-batch takes.

    Attributes:
        forward, backward: of each virtual stage.
        activation, gradient: of the transfer over the boundary between each virtual stage and the next; empty: none.
        latency: what every message takes beside, while the link carries the next one already.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    activation: Sequence[float] = ()
    gradient: Sequence[float] = ()
    latency: float = 0.0

    def __post_init__(self) -> None:
        parts = len(self.forward)
        if len(self.backward) != parts or not {len(self.activation), len(self.gradient)} <= {0, parts - 1}:
            lengths = ", ".join(f"{name} {len(getattr(self, name))}" for name in ("backward", "activation", "gradient"))
            raise ValueError(f"costs of {parts} virtual stages, with {parts - 1} boundaries, do not go with {lengths}")


class Span(NamedTuple):
    """Of an instruction: when the stage computes, when it waits for a message, or when a link carries its message."""

    stage: int
    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        total: seconds until the last stage has finished.
        busy: seconds that each stage computes.
        bubble: the idle part of all stages' time.
        peak: the most micro-batches whose activations each stage stores at a time, between forward and backward; each of its chunks
            stores its own. 0 where nothing goes backward.
        spans: in the order of each stage.
    """

    total: float
    busy: tuple[float, ...]
    bubble: float
    peak: tuple[int, ...]
    spans: tuple[Span, ...]


def simulate(name: Name, stages: int, micros: int, costs: Costs, chunks: int = 1, *, sizes: Sequence[float] = ()) -> Outcome:
    """One step under the schedule ``name``.

    Args:
        sizes: of each micro-batch, what its computing and transfers take by comparison with ``costs``; empty: all the same.

    Raises:
        UsageError: there is no such schedule.
    """
    programs = [tuple(schedule(name, stage, stages, micros, chunks)) for stage in range(stages)]
    if len(costs.forward) != stages * chunks:
        raise ValueError(f"costs of {len(costs.forward)} virtual stages, and there are {stages * chunks}")
    if len(sizes) not in (0, micros):
        raise ValueError(f"{len(sizes)} sizes of {micros} micro-batches")
    return play(programs, costs, sizes=sizes)


def play(programs: Sequence[Sequence[Instruction]], costs: Costs, *, sizes: Sequence[float] = ()) -> Outcome:
    """Do the instructions of each stage.

    A link carries one message at a time from a rank to another, in the order in which they are sent, while both compute.

    Raises:
        SimulationError: they do not come to an end, or a message is left.
    """
    stages = [_Stage(number, program) for number, program in enumerate(programs)]
    #: (whether it is an activation, the virtual stage it is for, the micro-batch) -> when it is there
    mail: dict[_Place, float] = {}
    waiting: dict[_Place, _Stage] = {}
    ready = deque(stages)
    while ready:
        stage = ready.popleft()
        while stage.done < len(stage.program):
            instruction = stage.program[stage.done]
            place = _place(instruction, stage.number, len(stages))
            size = sizes[instruction.micro] if sizes else 1.0
            if instruction.kind in ("forward", "backward"):
                stage.compute(instruction, size * getattr(costs, instruction.kind)[place[1]])
            elif instruction.kind.startswith("receive"):
                if place not in mail:
                    waiting[place] = stage
                    break
                stage.receive(instruction, mail.pop(place))
            else:
                if place in mail:
                    raise SimulationError(f"stage {stage.number} sends a second time: {_text(instruction)}")
                times = costs.activation if place[0] else costs.gradient
                boundary = place[1] - 1 if place[0] else place[1]
                seconds = size * times[boundary] if 0 <= boundary < len(times) else 0.0
                sent = stage.send(instruction, place[1] % len(stages), seconds)
                mail[place] = sent + costs.latency
                if place in waiting:
                    ready.append(waiting.pop(place))
            stage.done += 1
    _check_end(stages, waiting, mail)
    total = max(stage.clock for stage in stages)
    busy = tuple(stage.busy for stage in stages)
    return Outcome(
        total=total,
        busy=busy,
        bubble=max(0.0, 1 - sum(busy) / (len(stages) * total)) if total else 0.0,
        peak=tuple(stage.peak for stage in stages),
        spans=tuple(span for stage in stages for span in stage.spans),
    )


_Place = tuple[bool, int, int]


class _Stage:
    """What a stage has done so far."""

    def __init__(self, number: int, program: Sequence[Instruction]) -> None:
        self.number, self.program = number, program
        self.done = 0
        self.clock = self.busy = 0.0
        self.stored = self.peak = 0
        self.spans: list[Span] = []
        #: when the link to each other stage is free
        self._free: dict[int, float] = {}
        self._kept = {(each.chunk, each.micro) for each in program if each.kind == "backward"}

    def compute(self, instruction: Instruction, seconds: float) -> None:
        begin, self.clock = self.clock, self.clock + seconds
        self.busy += seconds
        self.spans.append(Span(self.number, instruction, begin, self.clock))
        if (instruction.chunk, instruction.micro) in self._kept:
            self.stored += 1 if instruction.kind == "forward" else -1
            self.peak = max(self.peak, self.stored)

    def receive(self, instruction: Instruction, here: float) -> None:
        begin, self.clock = self.clock, max(self.clock, here)
        self.spans.append(Span(self.number, instruction, begin, self.clock))

    def send(self, instruction: Instruction, to: int, seconds: float) -> float:
        """When the link has carried it."""
        begin = max(self.clock, self._free.get(to, 0.0))
        self._free[to] = begin + seconds
        self.spans.append(Span(self.number, instruction, begin, begin + seconds))
        return begin + seconds


def _place(instruction: Instruction, stage: int, stages: int) -> _Place:
    """Where a message goes; the virtual stage that computes."""
    is_activation = instruction.kind.endswith("activation")
    here = virtual(stage, instruction.chunk, stages)
    if instruction.kind == "send_activation":
        here += 1
    elif instruction.kind == "send_gradient":
        here -= 1
    return is_activation, here, instruction.micro


def _check_end(stages: Sequence[_Stage], waiting: dict[_Place, _Stage], mail: dict[_Place, float]) -> None:
    waits = []
    for place, stage in sorted(waiting.items(), key=lambda item: item[1].number):
        source = (place[1] + (-1 if place[0] else 1)) % len(stages)
        at = stages[source]
        doing = f"waits for {_text(at.program[at.done])}" if at.done < len(at.program) else "has finished"
        waits.append(f"stage {stage.number} waits for {_text(stage.program[stage.done])}, from stage {source}, which {doing}")
    if waits:
        raise SimulationError("; ".join(waits))
    if mail:
        left = [
            f"the {'activation' if is_activation else 'gradient'} of micro-batch {micro} for stage {stage}, chunk {chunk}"
            for (is_activation, to, micro) in sorted(mail)
            for stage, chunk in [home(to, len(stages))]
        ]
        raise SimulationError(f"nobody receives {', '.join(left)}")


def _text(instruction: Instruction) -> str:
    return f"the {instruction.kind.partition('_')[2]} of micro-batch {instruction.micro}, chunk {instruction.chunk}"
