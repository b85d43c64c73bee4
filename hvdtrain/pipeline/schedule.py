"""What a stage of a pipeline does, in which order: pure functions of a few integers.

The layers of a model are cut into ``stages * chunks`` virtual stages; virtual stage ``c * stages + s`` is chunk *c* of stage *s*.
Activations go from each virtual stage to the next, their gradients back. Sends return at once and receives wait, so whether a
schedule comes to its end depends on the order of computing alone: a receive stands right before what needs it, a send right after
what makes it.

In every schedule each chunk adds up the gradients of its micro-batches in the same order, 0, 1, 2 ...: the schedules give the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, zip_longest
from typing import Literal

from hvdtrain.errors import UsageError

Kind = Literal["receive_activation", "forward", "send_activation", "receive_gradient", "backward", "send_gradient"]
Name = Literal["gpipe", "1f1b", "interleaved", "forward"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """``micro`` is the number of the micro-batch, ``chunk`` which of the rank's virtual stages."""

    kind: Kind
    micro: int
    chunk: int = 0


def check(name: Name, stages: int, micros: int, chunks: int = 1) -> None:
    """
    Raises:
        UsageError: there is no such schedule.
    """
    if stages < 1:
        raise UsageError(f"a pipeline of {stages} stages", "use --pipeline 1 or more")
    if micros < 0:
        raise UsageError(f"{micros} micro-batches", "use --micro-batches 1 or more")
    if chunks < 1:
        raise UsageError(f"{chunks} virtual stages on each rank", "use --virtual-stages 1 or more")
    if chunks > 1 and stages == 1:
        raise UsageError(f"{chunks} virtual stages on each rank, but the pipeline has 1 stage", "use --pipeline 2 or more")
    if chunks > 1 and name in ("gpipe", "1f1b"):
        raise UsageError(
            f"schedule {name} has one virtual stage on each rank, not {chunks}",
            "use --schedule interleaved, or --virtual-stages 1",
        )
    if chunks == 1 and name == "interleaved":
        raise UsageError(
            "schedule interleaved has 2 or more virtual stages on each rank, not 1",
            "use --virtual-stages 2, or --schedule 1f1b" if stages > 1 else "use --schedule 1f1b",
        )


def virtual(stage: int, chunk: int, stages: int) -> int:
    """The virtual stage that is ``chunk`` of ``stage``."""
    return chunk * stages + stage


def home(virtual: int, stages: int) -> tuple[int, int]:
    """The stage and the chunk that a virtual stage is."""
    return virtual % stages, virtual // stages


def schedule(name: Name, stage: int, stages: int, micros: int, chunks: int = 1) -> Iterator[Instruction]:
    """The instructions of ``stage`` for one step of ``micros`` micro-batches; none without micro-batches.

    "gpipe": all forward, then all backward (Huang et al., "GPipe", NeurIPS 2019, arXiv 1811.06965), the first micro-batch first
    in both directions as in ``torch.distributed.pipelining``; the paper goes back in reverse, which takes as long.

    "1f1b": forward and backward in turn after ``stages - 1 - stage`` forward, so that no more than ``stages - stage`` micro-batches
    are stored (PipeDream-flush: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.1).

    "interleaved": the same with several chunks on each rank (section 2.2.2). The micro-batches of a round go through all chunks
    before those of the next; ``2 * (stages - 1 - stage) + (chunks - 1) * n`` go forward first, where *n* is the size of the largest
    round, and one more is stored. The paper's rounds have ``stages`` micro-batches, of which there must be a multiple. Ours have as
    many or a few more, equal but for one, so that there is no smaller round at the end which all would wait for: as long as there
    are ``stages`` micro-batches, the stages idle for ``(stages - 1) / (chunks * micros + stages - 1)`` of the time, a multiple or not.
    (``torch.distributed.pipelining`` has such rounds too, where they are all equal.)

    "forward": forward only, for evaluation.

    Raises:
        UsageError: as ``check``.
    """
    check(name, stages, micros, chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of {stages}")
    last = virtual(stages - 1, chunks - 1, stages)
    return (
        instruction
        for kind, micro, chunk in _computing(name, stage, stages, micros, chunks)
        for instruction in _with_messages(kind, micro, chunk, virtual(stage, chunk, stages), last)
    )


_Computing = tuple[Literal["forward", "backward"], int, int]


def _computing(name: Name, stage: int, stages: int, micros: int, chunks: int) -> Iterator[_Computing]:
    """Kind, micro-batch and chunk, in order."""
    rounds = _rounds(stages, micros)
    forward: Iterator[_Computing] = (("forward", *each) for each in _through(rounds, range(chunks)))
    if name == "forward":
        return forward
    backward: Iterator[_Computing] = (("backward", *each) for each in _through(rounds, range(chunks)[::-1]))
    if name == "gpipe":
        return chain(forward, backward)
    lead = stages - 1 - stage
    if name == "interleaved":
        lead = 2 * lead + (chunks - 1) * max(map(len, rounds))
    in_turn = chain.from_iterable(zip_longest(forward, backward))
    return chain(islice(forward, lead), (each for each in in_turn if each is not None))


def _rounds(stages: int, micros: int) -> list[range]:
    """Of ``stages`` micro-batches or more, as many as there can be; the larger ones first."""
    count = max(1, micros // stages)
    size, larger = divmod(micros, count)
    begins = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def _through(rounds: Sequence[range], chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((micro, chunk) for micros in rounds for chunk in chunks for micro in micros)


def _with_messages(
    kind: Literal["forward", "backward"], micro: int, chunk: int, virtual: int, last: int
) -> Iterator[Instruction]:
    if kind == "forward":
        if virtual > 0:
            yield Instruction("receive_activation", micro, chunk)
        yield Instruction("forward", micro, chunk)
        if virtual < last:
            yield Instruction("send_activation", micro, chunk)
    else:
        if virtual < last:
            yield Instruction("receive_gradient", micro, chunk)
        yield Instruction("backward", micro, chunk)
        if virtual > 0:
            yield Instruction("send_gradient", micro, chunk)
