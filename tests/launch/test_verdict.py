"""What is told about a job that has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch import Elastic, Host, Job
from hvdtrain.launch.frames import Ended, Event, Started
from hvdtrain.launch.verdict import Verdict, judge
from hvdtrain.launch.watch import Watch

JOB = Job(("x",), (Host("node1", 1), Host("node2", 2)), 3, tagged=True)
BARE = replace(JOB, tagged=False)
ELASTIC = replace(JOB, elastic=Elastic(1, 4, "d"))
ALL_STARTED = (Started(0, "node1"), Started(1, "node2"), Started(2, "node2"))
FAILED = Ended(1, "node2", {"code": 3, "told": 0, "time": 2.0, "phase": "train", "error": "ValueError: mine", "hint": "do"})
MISSES_IT = Ended(0, "node1", {"code": 1, "told": 0, "time": 1.0, "error": "HorovodInternalError"})
TOLD = Ended(1, "node2", {"code": 143, "told": 15, "time": 5.0, "error": "killed by signal 15 (SIGTERM)"})
LEFT = Ended(0, "node1", {"code": 137, "told": 0, "time": 6.0, "error": "its relay was killed by signal 9", "follows": True})
TOLD_WORDS = "rank 1 on node2 failed first: it was told to end (SIGTERM), and not by hvdtrain run"
ABOVE = "see its message above"

#: job, launcher's exit code, events -> verdict
CASES: dict[str, tuple[Job, int, tuple[Event, ...], Verdict | None]] = {
    "all is well": (JOB, 0, ALL_STARTED, None),
    "a rank failed": (
        JOB,
        1,
        (*ALL_STARTED, MISSES_IT, FAILED),
        Verdict(
            "rank 1 on node2 failed first in phase 'train': ValueError: mine\nrank 0 stopped because of that",
            "do",
            3,
        ),
    ),
    "a rank failed and the launcher did not mind": (
        JOB,
        0,
        (*ALL_STARTED, Ended(0, "node1", {"code": 0, "told": 0}), FAILED),
        Verdict("rank 1 on node2 failed first in phase 'train': ValueError: mine", "do", 3),
    ),
    "an elastic job outlives a rank": (ELASTIC, 0, (*ALL_STARTED, FAILED), None),
    "an elastic job that is given up": (
        ELASTIC,
        1,
        (*ALL_STARTED, FAILED),
        Verdict(
            "rank 1 on node2 failed first in phase 'train': ValueError: mine\n"
            "the elastic job could not go on with the ranks that were left",
            "do",
            3,
        ),
    ),
    "a host is silent": (
        JOB,
        1,
        (*ALL_STARTED, MISSES_IT),
        Verdict("no word from node2: is the host, or its network, down?\nrank 0 stopped because of that", "", 1),
    ),
    "a rank left early": (
        JOB,
        1,
        (*ALL_STARTED, Ended(2, "node2", {"code": 0, "told": 0}), Ended(0, "node1", {"code": 143, "told": 15})),
        Verdict(
            "the launcher ended with exit code 1; rank 2 on node2 (after 0.0 s) ended with exit code 0 while the others went on",
            "look for os._exit, sys.exit or a return that not all ranks take",
            1,
        ),
    ),
    "ranks never came": (
        JOB,
        213,
        ALL_STARTED[:2],
        Verdict("the launcher ended with exit code 213; never started: rank 2 on node2", ABOVE, 213),
    ),
    "no rank tells anything": (BARE, 7, (), Verdict("the launcher ended with exit code 7", ABOVE, 7)),
    "nobody knows": (ELASTIC, 7, (), Verdict("the launcher ended with exit code 7, though no rank failed", ABOVE, 7)),
    "a rank was told to end by somebody else": (
        JOB,
        143,
        (*ALL_STARTED, TOLD, Ended(0, "node1", {"code": 143, "told": 15})),
        Verdict(TOLD_WORDS, "somebody's kill, or is its host going down?", 143),
    ),
    "a rank was told to end by somebody else, and the others miss it": (
        JOB,
        1,
        (*ALL_STARTED, TOLD, MISSES_IT, Ended(2, "node2", {"code": 143, "told": 15})),
        Verdict(f"{TOLD_WORDS}\nrank 0 stopped because of that", "", 143),
    ),
    "a relay was killed, and the ranks that were ended because of that are heard of before": (
        JOB,
        137,
        (*ALL_STARTED, TOLD, LEFT, Ended(2, "node2", {"code": 143, "told": 15})),
        Verdict("rank 0 on node1 failed first: its relay was killed by signal 9", "", 137),
    ),
    "a rank has called MPI_Abort": (
        JOB,
        3,
        (*ALL_STARTED, TOLD, *(Ended(rank, "node1", {"code": 143, "told": 15}) for rank in (0, 2))),
        Verdict("the launcher ended with exit code 3, though no rank failed", ABOVE, 3),
    ),
    "it was asked to stop": (
        JOB,
        1,
        (
            *ALL_STARTED,
            Ended(0, "node1", {"code": 75, "told": 0, "time": 1.0, "phase": "x", "error": "stopped", "stopped": True}),
        ),
        Verdict("stopped", "", 75, is_final=True, stopped=True),
    ),
    "it was asked for what cannot be": (
        JOB,
        1,
        (*ALL_STARTED, Ended(0, "node1", {"code": 2, "told": 0, "time": 1.0, "phase": "x", "error": "no such option"})),
        Verdict(
            "rank 0 on node1 failed first in phase 'x': no such option\nno word from node2: is the host, or its network, down?",
            "",
            2,
            is_final=True,
        ),
    ),
    "a signal": (
        JOB,
        130,
        ALL_STARTED,
        Verdict(
            "the job was ended by a signal (SIGINT)",
            "go on from the last checkpoint: the same command with --run-dir runs/r",
            130,
            is_final=True,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    job, code, events, expected = CASES[name]
    watch = Watch(job, clock=lambda: 100.0)
    for event in events:
        watch.see(event)
    assert judge(code, watch, Path("runs/r")) == expected


def test_a_job_that_was_asked_to_stop_is_not_to_be_started_again_whatever_comes_then() -> None:
    watch = Watch(JOB, clock=lambda: 100.0)
    watch.asked()
    assert judge(143, watch) == Verdict(
        "stopped before the ranks began", "give the same command again: nothing was lost", 75, is_final=True, stopped=True
    )
    watch = Watch(JOB, clock=lambda: 100.0)
    for event in ALL_STARTED:
        watch.see(event)
    watch.asked()
    watch.see(FAILED)
    verdict = judge(1, watch)
    assert verdict is not None
    assert (verdict.exit_code, verdict.is_final, verdict.stopped) == (3, True, False)


def test_any_rank_that_stopped_in_order_speaks_for_all() -> None:
    """They have agreed on it; the primary may have been killed by its launcher meanwhile."""
    watch = Watch(JOB, clock=lambda: 100.0)
    killed = Ended(0, "node1", {"code": 143, "told": 0, "time": 1.0, "error": "killed by signal 15 (SIGTERM)"})
    stopped = Ended(
        1, "node2", {"code": 75, "told": 0, "time": 2.0, "phase": "x", "error": "saved", "stopped": True, "follows": True}
    )
    for event in (*ALL_STARTED, killed, stopped):
        watch.see(event)
    assert judge(1, watch) == Verdict("saved", "", 75, is_final=True, stopped=True)


ALL_DONE = (*ALL_STARTED, *(Ended(rank, "node1", {"code": 0, "told": 0}) for rank in range(3)))


@pytest.mark.parametrize("asks", [Watch.signalled, Watch.asked])
def test_a_signal_that_comes_when_all_ranks_have_ended_well_changes_nothing(asks: Callable[[Watch], None]) -> None:
    watch = Watch(JOB)
    for event in ALL_DONE:
        watch.see(event)
    asks(watch)
    assert judge(138, watch) is None


@pytest.mark.parametrize("last", [Ended(2, "node1", {"code": 0, "told": 15}), Ended(2, "node1", {"code": 3, "told": 0}), None])
def test_a_signal_that_comes_before_that_ends_the_job(last: Ended | None) -> None:
    watch = Watch(JOB)
    for event in (*ALL_DONE[:-1], last):
        if event is not None:
            watch.see(event)
    watch.signalled()
    assert judge(143, watch) is not None
