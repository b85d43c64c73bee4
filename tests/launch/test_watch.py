"""What is known of a running job from its events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hvdtrain.launch import Elastic, Host, Job, failures
from hvdtrain.launch.failures import Failure
from hvdtrain.launch.frames import Ended, Line, Started
from hvdtrain.launch.watch import Watch

JOB = Job(("x",), (Host("node1", 1), Host("node2", 2)), 3, {failures.JOB_VARIABLE: "a1"}, tagged=True)


def test_a_failure_is_known_from_the_relay_alone() -> None:
    watch = Watch(JOB)
    watch.see(Line(2, "node2", "out", "step 7"))
    watch.see(Ended(0, "node1", {"code": 1, "told": 0, "time": 12.0, "error": "ConnectionError"}))
    watch.see(Ended(2, "node2", {"code": 137, "told": 0, "time": 11.0, "error": "killed by signal 9 (SIGKILL)"}))
    watch.see(Ended(1, "node2", {"code": 143, "told": 15, "time": 10.0, "error": "killed by signal 15"}))
    first, second = watch.failures()
    assert first == Failure(2, 11.0, "node2", "", "killed by signal 9 (SIGKILL); the last line it wrote: step 7", exit_code=137)
    assert (second.rank, second.exit_code) == (0, 1)


def write(folder: Path, rank: int, **record: object) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "job": "a1", **record}))


def test_files_tell_of_ranks_whose_end_nobody_reported(tmp_path: Path) -> None:
    write(tmp_path, 0, phase="train", error="of a relay that knew no words")
    write(tmp_path, 1, error="of a rank that was told to end")
    write(tmp_path, 2, error="of a lost host")
    watch = Watch(JOB, tmp_path)
    watch.see(Ended(0, "node1", {"code": 1, "told": 0, "error": "exit code 1"}))
    watch.see(Ended(1, "node2", {"code": 1, "told": 15}))
    assert [failure.error for failure in watch.failures()] == ["of a relay that knew no words", "of a lost host"]
    assert Watch(replace(JOB, env={failures.JOB_VARIABLE: "another"}), tmp_path).failures() == []


def test_what_a_signal_causes_is_no_failure(tmp_path: Path) -> None:
    watch = Watch(JOB, tmp_path)
    watch.see(Started(0, "node1"))
    assert not watch.was_signalled
    watch.signalled()
    write(tmp_path, 2, error="bare rank")
    watch.see(Ended(0, "node1", {"code": 130, "told": 15, "phase": "train", "error": "interrupted"}))
    watch.see(Ended(1, "node2", {"code": 1, "told": 0, "phase": "train", "error": "ConnectionError: rank 0 is gone"}))
    assert watch.was_signalled
    assert watch.failures() == []


def test_what_had_failed_before_a_signal_stays_a_failure(tmp_path: Path) -> None:
    watch = Watch(JOB, tmp_path)
    watch.see(Started(1, "node2"))
    watch.see(Ended(1, "node2", {"code": 3, "told": 0, "error": "ValueError"}))
    watch.signalled()
    assert [failure.error for failure in watch.failures()] == ["ValueError"]
    bare = Watch(JOB, tmp_path)
    write(tmp_path, 2, error="bare rank")
    bare.signalled()
    assert [failure.error for failure in bare.failures()] == ["bare rank"]


def test_a_rank_that_was_ended_while_it_failed_is_the_cause_where_the_others_only_miss_it() -> None:
    """With Gloo: its process waits for the others at its end, they fail, and the launcher ends it."""
    watch = Watch(JOB)
    missing = {"code": 1, "told": 0, "time": 1.0, "error": "exit code 1: HorovodInternalError: shut down"}
    watch.see(Ended(0, "node1", missing))
    watch.see(Ended(1, "node2", {"code": 143, "told": 15, "time": 2.0, "said": "ValueError: mine"}))
    assert [(failure.rank, failure.error) for failure in watch.failures()] == [
        (1, "ValueError: mine"),
        (0, "exit code 1: HorovodInternalError: shut down"),
    ]
    watch.see(Ended(2, "node2", {"code": 1, "told": 0, "time": 3.0, "error": "MemoryError"}))
    assert [failure.rank for failure in watch.failures()] == [2, 0]


def test_a_rank_that_left_before_the_others_is_known_with_its_time() -> None:
    clock = iter([100.0, 103.25, 104.0, 104.5])
    watch = Watch(JOB, clock=lambda: next(clock))
    watch.see(Started(1, "node2"))
    watch.see(Ended(1, "node2", {"code": 0, "told": 0}))
    watch.see(Ended(0, "node1", {"code": 143, "told": 15}))
    watch.see(Ended(2, "node2", {"code": 0, "told": 0}))
    assert watch.left_early() == ["rank 1 on node2 (after 3.2 s)"]
    well = Watch(replace(JOB, hosts=JOB.hosts[:1], np=1))
    well.see(Started(0, "node1"))
    well.see(Ended(0, "node1", {"code": 0, "told": 0}))
    assert well.left_early() == []


def test_ranks_that_are_not_where_they_were_planned_are_noticed() -> None:
    watch = Watch(JOB)
    watch.see(Started(0, "pod-a"))
    watch.see(Started(1, "pod-b"))
    assert watch.misplaced() == ""
    watch.see(Started(2, "pod-b"))
    assert watch.misplaced() == ""
    alone = Watch(JOB)
    for rank in range(3):
        alone.see(Started(rank, "launcher"))
    assert alone.misplaced() == "hosts seen: 1 of 2 planned (launcher)"
    more = Watch(JOB)
    for rank in (0, 1, 2, 3):
        more.see(Started(rank, f"node{1 + (rank > 0)}"))
    assert more.misplaced() == "rank 3 started, but 3 ranks were planned"


def test_who_is_silent_and_who_never_came_is_known() -> None:
    watch = Watch(JOB)
    watch.see(Started(0, "node1"))
    watch.see(Started(1, "node2"))
    watch.see(Ended(0, "node1", {"code": 1, "told": 15}))
    assert watch.silent() == ["rank 1 on node2"]
    assert watch.silent_hosts() == ["node2"]
    assert Watch(JOB).silent_hosts() == []
    assert watch.never_started() == ["rank 2 on node2"]


def test_an_elastic_job_has_no_plan_and_bare_ranks_tell_nothing() -> None:
    for job in (replace(JOB, elastic=Elastic(1, 4, "d")), replace(JOB, tagged=False)):
        watch = Watch(job)
        assert (watch.never_started(), watch.misplaced()) == ([], "")
