"""The order of instructions: proved for every small pipeline by doing them on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.pipeline.schedule import Instruction, Name, check, home, schedule, virtual
from hvdtrain.pipeline.simulate import Costs, Outcome, play

FORWARD_S, BACKWARD_S = 1.0, 2.0

#: every schedule with each number of chunks that it takes
KINDS: list[tuple[Name, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved", c) for c in (2, 3, 4)),
    *(("forward", c) for c in (1, 2, 3, 4)),
]
STAGES = range(1, 9)
MICROS = range(33)


def _programs(name: Name, stages: int, micros: int, chunks: int) -> list[list[Instruction]]:
    return [list(schedule(name, stage, stages, micros, chunks)) for stage in range(stages)]


def _cases(chunks: int) -> Iterator[tuple[int, int]]:
    return ((stages, micros) for stages in STAGES for micros in MICROS if stages > 1 or chunks == 1)


def _largest_round(stages: int, micros: int) -> int:
    return -(-micros // max(1, micros // stages))


def _stored(name: Name, stage: int, stages: int, micros: int, chunks: int) -> int:
    """The most activations that a stage keeps, by theory."""
    if name == "forward":
        return 0
    if name == "gpipe":
        return micros
    if name == "1f1b":
        return min(stages - stage, micros)
    # Those that go forward first, and the one more that goes before the first goes back.
    return min(2 * (stages - 1 - stage) + (chunks - 1) * _largest_round(stages, micros) + 1, chunks * micros)


def _seconds(name: Name, stages: int, micros: int, chunks: int) -> float:
    """What a step takes where stages are equal and links free, by theory: ``bubble`` below follows where micros >= stages."""
    each = FORWARD_S + (BACKWARD_S if name != "forward" else 0)
    return each * ((chunks - 1) * max(micros, stages) + micros + stages - 1) if micros else 0.0


def _is_in_order(program: list[Instruction], name: Name, micros: int, chunks: int) -> bool:
    """Each chunk computes its micro-batches in order, each once in both directions, and forward first."""
    whole = list(range(micros))
    for chunk in range(chunks):
        mine = [each for each in program if each.chunk == chunk]
        begun = [each.micro for each in mine if each.kind == "forward"]
        ended = [each.micro for each in mine if each.kind == "backward"]
        place = {(each.kind, each.micro): number for number, each in enumerate(mine)}
        if begun != whole or ended != (whole if name != "forward" else []):
            return False
        if any(place["forward", micro] > place["backward", micro] for micro in ended):
            return False
    return True


def _messages_are_where_they_are_needed(program: list[Instruction]) -> bool:
    """A receive right before what needs it, a send right after what makes it."""
    for number, each in enumerate(program):
        kind = "forward" if each.kind.endswith("activation") else "backward"
        step = {"receive": 1, "send": -1}.get(each.kind.partition("_")[0])
        if step and program[number + step] != Instruction(
            "forward" if kind == "forward" else "backward", each.micro, each.chunk
        ):
            return False
    return True


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_every_small_pipeline_ends_as_soon_and_stores_as_little_as_theory_says(name: Name, chunks: int) -> None:
    """``play`` itself refuses instructions that wait for ever, and messages that nobody receives."""
    for stages, micros in _cases(chunks):
        programs = _programs(name, stages, micros, chunks)
        for program in programs:
            assert _is_in_order(program, name, micros, chunks), (stages, micros)
            assert _messages_are_where_they_are_needed(program), (stages, micros)
        outcome = _played(programs, chunks)
        assert outcome.peak == tuple(_stored(name, stage, stages, micros, chunks) for stage in range(stages)), (stages, micros)
        assert outcome.total == _seconds(name, stages, micros, chunks), (stages, micros)
        if chunks == 1 or micros >= stages:
            expected = (stages - 1) / (chunks * micros + stages - 1) if micros else 0.0
            assert outcome.bubble == pytest.approx(expected), (stages, micros)


def _played(programs: list[list[Instruction]], chunks: int) -> Outcome:
    parts = len(programs) * chunks
    return play(programs, Costs([FORWARD_S] * parts, [BACKWARD_S] * parts))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 5)])
def test_larger_pipelines_end_too(name: Name, chunks: int) -> None:
    for stages, micros in ((9, 40), (16, 17), (16, 31), (12, 5), (11, 47)):
        outcome = _played(_programs(name, stages, micros, chunks), chunks)
        assert outcome.total == _seconds(name, stages, micros, chunks), (stages, micros)


def test_with_a_multiple_of_the_stages_interleaved_stores_what_megatron_does() -> None:
    for stages, times, chunks in ((2, 3, 2), (4, 2, 2), (4, 3, 4), (8, 4, 4)):
        outcome = _played(_programs("interleaved", stages, stages * times, chunks), chunks)
        first = [2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages)]
        assert outcome.peak == tuple(min(each + 1, chunks * stages * times) for each in first)


def _computing(name: Name, stages: int, micros: int, chunks: int = 1) -> list[str]:
    """F0a: micro-batch 0 forward through chunk a."""
    return [
        " ".join(
            f"{each.kind[0].upper()}{each.micro}{'abcd'[each.chunk] if chunks > 1 else ''}"
            for each in program
            if "_" not in each.kind
        )
        for program in _programs(name, stages, micros, chunks)
    ]


def test_gpipe_goes_forward_with_all_and_back_in_the_same_order() -> None:
    assert _computing("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_of_the_paper() -> None:
    """Figure 4 of Narayanan et al. 2021, the upper half."""
    assert _computing("1f1b", 4, 8) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert _computing("1f1b", 4, 2) == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_interleaved_of_the_paper() -> None:
    """Figure 4 of Narayanan et al. 2021, the lower half: the last stage, which has the fewest before the first goes back."""
    last = _computing("interleaved", 4, 8, 2)[-1]
    assert last.startswith("F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a")


def test_interleaved_has_a_larger_round_where_micro_batches_are_left() -> None:
    assert (
        _computing("interleaved", 2, 5, 2)[1]
        == "F0a F1a F2a F0b B0b F1b B1b F2b B2b F3a B0a F4a B1a F3b B2a F4b B3b B4b B3a B4a"
    )


def test_evaluation_only_goes_forward() -> None:
    assert _computing("forward", 2, 5, 2) == ["F0a F1a F2a F0b F1b F2b F3a F4a F3b F4b"] * 2


def test_messages_of_a_middle_stage() -> None:
    assert [(each.kind, each.micro, each.chunk) for each in schedule("1f1b", 1, 3, 1)] == [
        ("receive_activation", 0, 0),
        ("forward", 0, 0),
        ("send_activation", 0, 0),
        ("receive_gradient", 0, 0),
        ("backward", 0, 0),
        ("send_gradient", 0, 0),
    ]


def test_a_single_stage_sends_nothing() -> None:
    for name in ("gpipe", "1f1b"):
        assert {each.kind for each in schedule(name, 0, 1, 4)} == {"forward", "backward"}


def test_the_last_stage_of_one_chunk_sends_to_the_first_of_the_next() -> None:
    kinds = {(each.kind, each.chunk) for each in schedule("interleaved", 1, 2, 2, 2)}
    assert ("send_activation", 0) in kinds
    assert ("send_activation", 1) not in kinds
    assert ("receive_activation", 1) in {(each.kind, each.chunk) for each in schedule("interleaved", 0, 2, 2, 2)}


def test_virtual_stages_go_round_the_ranks() -> None:
    assert [home(number, 3) for number in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert all(virtual(*home(number, 3), 3) == number for number in range(6))


@pytest.mark.parametrize(
    ("name", "stages", "micros", "chunks", "message", "hint"),
    [
        ("1f1b", 0, 4, 1, "a pipeline of 0 stages", "--pipeline 1"),
        ("1f1b", 2, -1, 1, "-1 micro-batches", "--micro-batches 1"),
        ("forward", 2, 4, 0, "0 virtual stages", "--virtual-stages 1"),
        ("gpipe", 2, 4, 2, "schedule gpipe has one virtual stage on each rank, not 2", "--schedule interleaved"),
        ("1f1b", 2, 4, 3, "schedule 1f1b has one virtual stage on each rank, not 3", "--schedule interleaved"),
        ("interleaved", 2, 4, 1, "interleaved has 2 or more virtual stages", "--virtual-stages 2, or --schedule 1f1b"),
        ("interleaved", 1, 4, 1, "interleaved has 2 or more virtual stages", "use --schedule 1f1b"),
        ("interleaved", 1, 4, 2, "but the pipeline has 1 stage", "--pipeline 2"),
        ("forward", 1, 4, 2, "but the pipeline has 1 stage", "--pipeline 2"),
    ],
)
def test_what_cannot_be_is_refused_at_once(name: Name, stages: int, micros: int, chunks: int, message: str, hint: str) -> None:
    for ask in (lambda: check(name, stages, micros, chunks), lambda: schedule(name, 0, stages, micros, chunks)):
        with pytest.raises(UsageError) as caught:
            ask()
        assert message in caught.value.message
        assert hint in caught.value.hint


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_there_is_not_is_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="of 2"):
        schedule("1f1b", stage, 2, 1)
