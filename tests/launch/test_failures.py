"""The summary of a failed job."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.launch import failures
from hvdtrain.launch.failures import Failure

FIRST = Failure(1, 10.0, "node2", "train", "ValueError: loss is nan", "lower the rate", "Traceback ...\n  line", 1)
LATER = Failure(0, 10.5, "node1", "reduce", "HorovodInternalError: shut down\nmore", exit_code=3)


def test_the_earliest_is_told_in_full_and_the_others_in_one_line() -> None:
    assert failures.report(failures.earliest_first([LATER, FIRST])) == (
        "rank 1 on node2 failed first in phase 'train': ValueError: loss is nan\n"
        "\n"
        "    Traceback ...\n"
        "      line\n"
        "\n"
        "rank 0 on node1: HorovodInternalError: shut down"
    )


def test_a_thousand_ranks_do_not_fill_the_screen() -> None:
    many = [Failure(rank, float(rank), "n", error="x" * 1000) for rank in range(1000)]
    lines = failures.report(many).splitlines()
    assert len(lines) < 25
    assert lines[-1] == "... and 983 more ranks"
    assert max(map(len, lines[1:])) < 200


def test_records_are_read_and_a_damaged_one_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(json.dumps({"rank": 0, "time": 10.5, "host": "node1", "error": "b", "exit_code": 3}))
    (tmp_path / "rank-1.json").write_text(
        json.dumps({"rank": 1, "time": 10.0, "host": "node2", "error": "a", "exit_code": None})
    )
    (tmp_path / "rank-2.json").write_text('{"rank": 2, "ti')
    (tmp_path / "rank-3.json").write_text('["what?"]')
    found = failures.read(tmp_path)
    assert [(failure.rank, failure.error) for failure in found] == [(1, "a"), (0, "b")]
    assert failures.read(tmp_path / "nothing") == []


def test_the_exit_code_is_the_first_ranks_and_never_zero_after_a_failure() -> None:
    assert failures.exit_code([FIRST, LATER], 255) == 1
    assert failures.exit_code([Failure(0, 1.0, exit_code=2)], 1) == 2
    assert failures.exit_code([Failure(0, 1.0)], 137) == 137
    assert failures.exit_code([Failure(0, 1.0)], 0) == 1
    assert failures.exit_code([], 7) == 7
    assert failures.exit_code([], 0) == 0
