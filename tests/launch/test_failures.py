"""The summary of a failed job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.launch import failures
from hvdtrain.launch.failures import Failure

FIRST = Failure(1, 10.0, "node2", "train", "ValueError: loss is nan", "lower the rate", "Traceback ...\n  line", 1)
LATER = Failure(0, 10.5, "node1", "reduce", "OSError: no space left\nmore", exit_code=3)


def test_the_earliest_is_told_in_full_and_the_others_in_one_line() -> None:
    assert failures.report(failures.earliest_first([LATER, FIRST])) == (
        "rank 1 on node2 failed first in phase 'train': ValueError: loss is nan\n"
        "\n"
        "    Traceback ...\n"
        "      line\n"
        "\n"
        "rank 0 on node1: OSError: no space left"
    )


BYSTANDERS = (
    "HorovodInternalError: [/tmp/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:1234: Connection reset",
    "exit code 1: horovod.common.exceptions.HorovodInternalError: Broken pipe",
    "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks",
    "this rank waited for the others to reduce with, and Horovod was shut down",
    "rank 1 (process 4711) has ended, and this rank waits in the exchange of gradients with it",
)


def test_ranks_that_only_miss_another_one_are_no_cause_even_if_their_clocks_say_they_were_first() -> None:
    missing = [Failure(rank, 1.0, "node1", error=error, exit_code=1) for rank, error in enumerate(BYSTANDERS, 2)]
    follower = Failure.from_record({"rank": 7, "time": 0.5, "phase": "setting up", "follows": True})
    found = failures.earliest_first([*missing, follower, LATER, FIRST])
    assert found[0] is FIRST
    assert failures.report(found).splitlines()[-2:] == [
        "rank 0 on node1: OSError: no space left",
        "ranks 2, 3, 4, 5, 6, 7 stopped because of that",
    ]
    alone = failures.report(missing[:2]).splitlines()
    assert alone[0].startswith("rank 2 on node1 failed first: HorovodInternalError: ")
    assert alone[1:] == ["rank 3 stopped because of that"]


def test_a_thousand_ranks_do_not_fill_the_screen() -> None:
    many = [Failure(rank, float(rank), "n", error="x" * 1000) for rank in range(1000)]
    lines = failures.report(many).splitlines()
    assert len(lines) < 25
    assert lines[-1] == "... and 983 more ranks"
    assert max(map(len, lines[1:])) < 200


def test_the_records_of_this_job_are_read_and_a_damaged_one_hides_nothing(tmp_path: Path) -> None:
    """Whatever the hosts' clocks say: the first record is a day old."""
    records = [
        {"rank": 0, "job": "a1", "time": 10.5, "host": "node1", "error": "b", "exit_code": 3},
        {"rank": 1, "job": "a1", "time": 10.0 - 86400, "host": "node2", "error": "a", "exit_code": None},
        {"rank": 2, "job": "a0", "time": 9.0, "error": "another job's"},
        {"rank": 3, "time": 9.0, "error": "nobody's"},
    ]
    for record in records:
        (tmp_path / f"rank-{record['rank']}.json").write_text(json.dumps(record))
    (tmp_path / "rank-4.json").write_text('{"rank": 4, "ti')
    (tmp_path / "rank-5.json").write_text('["what?"]')
    found = failures.read(tmp_path, "a1")
    assert [(failure.rank, failure.error) for failure in found] == [(1, "a"), (0, "b")]
    assert failures.read(tmp_path / "nothing", "a1") == []


def test_the_exit_code_is_the_first_ranks_and_never_zero_after_a_failure() -> None:
    assert failures.exit_code([FIRST, LATER], 255) == 1
    assert failures.exit_code([Failure(0, 1.0, exit_code=2)], 1) == 2
    assert failures.exit_code([Failure(0, 1.0)], 137) == 137
    assert failures.exit_code([Failure(0, 1.0)], 0) == 1
    assert failures.exit_code([], 7) == 7
    assert failures.exit_code([], 0) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "killed by signal 9 (SIGKILL)"),
        (192, "killed by signal 64 "),
        (128, "exit code 128"),
        (193, "exit code 193"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_code_that_stands_for_no_signal_is_told_as_a_code(code: int, words: str) -> None:
    assert failures.words_for(code, [])["error"].startswith(words)


def test_a_killed_rank_is_told_apart_by_what_the_kernel_has_counted() -> None:
    assert failures.words_for(137, [], oom_kills=2)["error"].startswith("killed by signal 9 (SIGKILL): out of memory")
    assert "somebody's kill (the out-of-memory killer ended nothing" in failures.words_for(137, [], oom_kills=0)["error"]
    assert failures.words_for(137, [])["error"].endswith("the out-of-memory killer, or somebody's kill")
    assert failures.words_for(139, [], oom_kills=1)["error"].startswith("killed by signal 11")
