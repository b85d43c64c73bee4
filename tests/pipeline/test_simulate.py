"""The virtual clock."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.pipeline.schedule import Instruction, Kind, Name
from hvdtrain.pipeline.simulate import Costs, Outcome, SimulationError, play, simulate


def _spans(outcome: Outcome, kind: str) -> list[tuple[int, int, float, float]]:
    return [
        (span.stage, span.instruction.micro, span.begin, span.end) for span in outcome.spans if span.instruction.kind == kind
    ]


def test_two_equal_stages() -> None:
    outcome = simulate("1f1b", 2, 2, Costs([1.0, 1.0], [2.0, 2.0]))
    assert outcome.total == 9
    assert outcome.busy == (6, 6)
    assert outcome.bubble == pytest.approx(1 / 3)
    assert outcome.peak == (2, 1)
    assert _spans(outcome, "forward") == [(0, 0, 0, 1), (0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 4, 5)]
    assert _spans(outcome, "backward") == [(0, 0, 4, 6), (0, 1, 7, 9), (1, 0, 2, 4), (1, 1, 5, 7)]


def test_a_link_carries_one_message_at_a_time_while_stages_compute() -> None:
    outcome = simulate("forward", 2, 2, Costs([1.0, 1.0], [0.0, 0.0], activation=[3.0]))
    assert _spans(outcome, "send_activation") == [(0, 0, 1, 4), (0, 1, 4, 7)]
    assert _spans(outcome, "receive_activation") == [(1, 0, 0, 4), (1, 1, 5, 7)]
    assert _spans(outcome, "forward") == [(0, 0, 0, 1), (0, 1, 1, 2), (1, 0, 4, 5), (1, 1, 7, 8)]
    assert outcome.total == 8


def test_latency_comes_on_top_but_does_not_keep_the_link() -> None:
    outcome = simulate("forward", 2, 2, Costs([1.0, 1.0], [0.0, 0.0], activation=[3.0], latency=0.5))
    assert _spans(outcome, "forward")[2:] == [(1, 0, 4.5, 5.5), (1, 1, 7.5, 8.5)]


def test_both_directions_of_a_link_are_used_at_once() -> None:
    costs = Costs([1.0, 1.0], [1.0, 1.0], activation=[2.0], gradient=[2.0])
    outcome = simulate("1f1b", 2, 3, costs)
    activations, gradients = _spans(outcome, "send_activation"), _spans(outcome, "send_gradient")
    assert activations[1][2:] == (3, 5)
    assert gradients[0][2:] == (5, 7)
    assert activations[2][2:] == (9, 11)
    assert gradients[1][2:] == (7, 9)


def test_chunks_of_two_ranks_share_the_link_between_them() -> None:
    """From rank 1 to rank 0 go activations of the first chunk and gradients of both."""
    costs = Costs([1.0] * 4, [1.0] * 4, activation=[5.0] * 3, gradient=[5.0] * 3)
    outcome = simulate("interleaved", 2, 4, costs, 2)
    sent = sorted(
        (span.begin, span.end, span.instruction.kind)
        for span in outcome.spans
        if span.stage == 1 and span.instruction.kind.startswith("send")
    )
    assert {kind for _, _, kind in sent} == {"send_activation", "send_gradient"}
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(sent))


def test_a_smaller_last_micro_batch_takes_less() -> None:
    costs = Costs([1.0, 1.0], [2.0, 2.0], activation=[4.0], gradient=[4.0])
    assert simulate("1f1b", 1, 3, Costs([1.0], [2.0]), sizes=[1, 1, 0.5]).total == 7.5
    outcome = simulate("gpipe", 2, 2, costs, sizes=[1, 0.25])
    assert [end - begin for _, _, begin, end in _spans(outcome, "send_activation")] == [4, 1]
    assert [end - begin for _, _, begin, end in _spans(outcome, "backward")] == [2, 0.5] * 2


def test_the_slowest_stage_sets_the_pace() -> None:
    outcome = simulate("1f1b", 3, 100, Costs([1.0, 3.0, 1.0], [1.0, 3.0, 1.0]))
    assert outcome.busy == (200, 600, 200)
    assert outcome.total == 1 + 600 + 1


def test_without_micro_batches_no_time_passes() -> None:
    outcome = simulate("interleaved", 2, 0, Costs([1.0] * 4, [1.0] * 4), 2)
    assert (outcome.total, outcome.bubble, outcome.busy, outcome.peak, outcome.spans) == (0, 0, (0, 0), (0, 0), ())


NAMES: list[tuple[Name, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("forward", 1),
    ("forward", 2),
]


@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 11), st.data())
@settings(max_examples=60, deadline=None)
def test_nothing_happens_before_it_can(kind: tuple[Name, int], stages: int, micros: int, data: st.DataObject) -> None:
    name, chunks = kind
    parts = stages * chunks

    def drawn(count: int) -> list[float]:
        return data.draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))

    costs = Costs(drawn(parts), drawn(parts), drawn(parts - 1), drawn(parts - 1), latency=drawn(1)[0])
    sizes = drawn(micros)
    outcome = simulate(name, stages, micros, costs, chunks, sizes=sizes)

    lines: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    ends: dict[tuple[str, int, int], float] = {}
    begins: dict[tuple[str, int, int], float] = {}
    for span in outcome.spans:
        word, _, what = span.instruction.kind.partition("_")
        part = span.instruction.chunk * stages + span.stage
        key = (span.instruction.kind, part, span.instruction.micro)
        begins[key], ends[key] = span.begin, span.end
        if word == "send":
            to = (part + (1 if what == "activation" else -1)) % stages
            lines["link", span.stage, to].append((span.begin, span.end))
        else:
            lines["stage", span.stage, 0].append((span.begin, span.end))
    for line in lines.values():  # in the order of the instructions: one after the other
        assert all(before[1] <= after[0] for before, after in pairwise(line))
    for (word, part, micro), begin in begins.items():
        if word == "forward" and part:
            assert begin >= ends["forward", part - 1, micro] + sizes[micro] * costs.activation[part - 1] + costs.latency
        elif word == "backward":
            assert begin >= ends["forward", part, micro]
            if part < parts - 1:
                assert begin >= ends["backward", part + 1, micro] + sizes[micro] * costs.gradient[part] + costs.latency
    assert outcome.total == max(end for (word, _, _), end in ends.items() if not word.startswith("send"))
    each = [sum(costs.forward[s::stages]) + (sum(costs.backward[s::stages]) if name != "forward" else 0) for s in range(stages)]
    assert outcome.busy == tuple(sum(sizes) * cost for cost in each)


WORDS: dict[str, Kind] = {
    "<a": "receive_activation",
    "F": "forward",
    "a>": "send_activation",
    "<g": "receive_gradient",
    "B": "backward",
    "g>": "send_gradient",
}


def _program(text: str) -> list[Instruction]:
    return [Instruction(WORDS[word[:-1]], int(word[-1])) for word in text.split()]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            "F0 a>0 <g0 B0 F1 a>1 <g1 B1",
            "<a0 F0 <a1 F1 B0 g>0 B1 g>1",
            "stage 0 waits for the gradient of micro-batch 0, chunk 0, from stage 1, which waits for the activation of micro-batch 1, "
            "chunk 0; stage 1 waits for the activation of micro-batch 1, chunk 0, from stage 0, which waits for the gradient of "
            "micro-batch 0, chunk 0",
        ),
        ("F0", "<a0 F0", "stage 1 waits for the activation of micro-batch 0, chunk 0, from stage 0, which has finished"),
        ("F0 a>0", "", "nobody receives the activation of micro-batch 0 for stage 1, chunk 0"),
        ("F0 a>0 a>0", "", "stage 0 sends a second time: the activation of micro-batch 0, chunk 0"),
        ("F0", "F0 a>0", "nobody receives the activation of micro-batch 0 for stage 0, chunk 1"),
    ],
)
def test_instructions_that_cannot_end_are_told(first: str, second: str, message: str) -> None:
    with pytest.raises(SimulationError) as caught:
        play([_program(first), _program(second)], Costs([1.0, 1.0], [1.0, 1.0], [1.0], [1.0]))
    assert str(caught.value) == message


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="backward 1"):
        Costs([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="activation 2"):
        Costs([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="costs of 2 virtual stages, and there are 3"):
        simulate("1f1b", 3, 1, Costs([1.0, 1.0], [1.0, 1.0]))
    with pytest.raises(ValueError, match="3 sizes of 2 micro-batches"):
        simulate("1f1b", 2, 2, Costs([1.0, 1.0], [1.0, 1.0]), sizes=[1, 1, 1])
