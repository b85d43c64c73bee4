"""Who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.launch import Host, Job
from hvdtrain.launch.frames import Decoder, Ended, Line, Report, Started, encode_report
from hvdtrain.launch.stall import Missing, Stall, explain, ranks
from hvdtrain.launch.verdict import judge
from hvdtrain.launch.watch import Watch

HOSTS = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
WAITS = Stall("training step", 412, 60.0, "allreduce of layer2.weight", True, "x.py:1 in f", "MainThread:\n  waits\n")
LOADS = Stall("data loading", 412, 60.5, "", True, "train.py:88 in take", "hvdtrain-loader:\n  File train.py, line 88\n")
TRACED = replace(WAITS, wait="allreduce of the gradients, inside the traced step", certain=False)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0 and 1"), ([0, 1, 3], "ranks 0, 1 and 3"), ([0, 1, 2, 3, 5], "ranks 0-3 and 5")],
)
def test_ranks_in_words(numbers, text):
    assert ranks(numbers) == text


def test_the_ranks_that_wait_are_told_together_and_the_other_one_with_its_stacks():
    text = explain({3: WAITS, 2: LOADS, 0: WAITS, 1: WAITS}, HOSTS, {}, {})
    assert text.splitlines() == [
        "ranks 0, 1 and 3 wait in allreduce of layer2.weight (step 412)",
        "rank 2 on node2 is in data loading (step 412): train.py:88 in take",
        "",
        "    stacks of rank 2, the innermost call last:",
        "    hvdtrain-loader:",
        "      File train.py, line 88",
    ]


def test_ranks_in_different_collectives_are_told_apart():
    other = replace(WAITS, step=413, wait="allreduce of metrics/train", stacks="MainThread:\n  other\n")
    lines = explain({0: WAITS, 2: WAITS, 1: other}, HOSTS, {}, {}).splitlines()
    assert lines[:2] == [
        "ranks 0 and 2 wait in allreduce of layer2.weight (step 412)",
        "rank 1 waits in allreduce of metrics/train (step 413)",
    ]
    assert lines[3] == "    stacks of rank 1, the innermost call last:"


def test_a_rank_that_computes_or_waits_is_taken_to_wait_where_another_one_is_elsewhere():
    lines = explain({0: TRACED, 2: LOADS}, HOSTS, {}, {}).splitlines()
    assert lines[0] == "rank 0 waits in allreduce of the gradients, inside the traced step (step 412)"
    assert lines[1].startswith("rank 2 on node2 is in data loading")


def test_horovods_word_tells_who_of_them_computes():
    lines = explain({0: TRACED, 2: TRACED}, HOSTS, {}, {2: "gradient/a"}).splitlines()
    assert lines[0] == "rank 0 waits in allreduce of the gradients, inside the traced step (step 412)"
    assert lines[1] == (
        "rank 2 on node2 is in training step (step 412), computing or waiting in allreduce of the gradients, inside the traced "
        "step: x.py:1 in f; it did not bring gradient/a"
    )


def test_horovods_lines_about_missing_ranks_are_read_anew_each_time():
    missing = Missing()
    for text in ("x", "Missing ranks:", "1: [allreduce.gradient/a, b, c, d]", "3: [b]", "y", "4: [no]"):
        missing.read(text)
    assert missing.ranks == {1: "gradient/a, b, c and 1 more", 3: "b"}
    missing.read("Missing ranks:")
    missing.read("0: [z]")
    assert missing.ranks == {0: "z"}


def record(stall):
    return {"stall": stall.to_record()}


def test_a_record_is_read_as_far_as_it_makes_sense():
    assert Stall.from_record(WAITS.to_record()) == WAITS
    assert Stall.from_record({"phase": 3, "step": "x", "seconds": 2, "odd": 1, "at": None}) == Stall(seconds=2)


def test_a_job_that_does_not_move_is_judged_by_what_its_ranks_said_also_by_a_stopped_and_by_a_silent_one():
    now = [0.0]
    watch = Watch(Job(("x",), (Host("node1", 2), Host("node2", 1), Host("node3", 1)), 4, tagged=True), clock=lambda: now[0])
    for rank, host in enumerate(("node1", "node1", "node2", "node3")):
        watch.see(Started(rank, host))
    watch.see(Report(3, "node3", record(LOADS)))  # and then it moved on, and lost its host
    now[0] = 100.0
    for event in Decoder().feed(b"".join(encode_report(2, "node2", {"suspended": True}))):
        watch.see(event)
    watch.see(Report(1, "node1", record(replace(WAITS, seconds=30.0))))
    last = {"code": 124, "told": 0, "time": 5.0, "phase": "training step", "error": "no progress", "hint": "raise it"}
    watch.see(Ended(0, "node1", {**last, **record(WAITS)}))
    watch.see(Ended(1, "node1", {"code": 143, "told": 15}))
    verdict = judge(1, watch)
    assert verdict is not None
    assert verdict.exit_code == 124
    assert verdict.hint == "raise it"
    assert verdict.message.splitlines() == [
        "no progress for 60 s",
        "ranks 0 and 1 wait in allreduce of layer2.weight (step 412)",
        "rank 2 on node2 is stopped (SIGSTOP, or a debugger)",
        "rank 3 on node3 says nothing: is the host, or its network, down?",
    ]


def test_an_own_failure_comes_before_a_stall():
    watch = Watch(Job(("x",), (Host("node1", 2),), 2, tagged=True))
    watch.see(Started(0, "node1"))
    watch.see(Started(1, "node1"))
    watch.see(Ended(1, "node1", {"code": 1, "told": 0, "time": 2.0, "phase": "train", "error": "ValueError: mine"}))
    watch.see(Ended(0, "node1", {"code": 124, "told": 0, "time": 9.0, "error": "no progress", **record(WAITS)}))
    verdict = judge(1, watch)
    assert verdict is not None
    assert verdict.message.startswith("rank 1 on node1 failed first in phase 'train': ValueError: mine")


def test_other_lines_do_not_disturb():
    watch = Watch(Job(("x",), (Host("node1", 1),), 1, tagged=True))
    watch.see(Line(0, "node1", "err", "Missing ranks:"))
    watch.see(Report(0, "node1", {"odd": 1}))
    assert watch.stall() == ""
