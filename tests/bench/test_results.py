from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hvdtrain.bench import events, results
from hvdtrain.bench.events import Finished, Note, Progress
from hvdtrain.bench.results import Timing
from hvdtrain.errors import UsageError
from tests.bench.examples import ALLREDUCE, LINK


def test_a_timing_is_the_median_and_the_quartiles():
    assert Timing.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Timing(3.0, 1.0, 2.0, 4.0, 5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 2.0, 1)
    assert Timing.of([1.0, 2.0, 3.0]).noise == pytest.approx(0.5)


def test_a_check_leaves_everything_as_it_is(tmp_path: Path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("old", "new", "link", "pipe"):
        results.check(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "old", "pipe"]
    assert (tmp_path / "old").read_text() == "old"
    for name in ("", "no/new", "old/new"):
        with pytest.raises(UsageError, match="cannot be written: "):
            results.check(tmp_path / name)


@pytest.mark.parametrize("report", [ALLREDUCE, LINK])
def test_a_report_that_is_written_is_read_again(report, tmp_path: Path):
    results.write(tmp_path / "found.json", report)
    assert results.read(tmp_path / "found.json") == report


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "has no attribute"),
        ('{"kind": "link"}', "no report of this version"),
        (json.dumps(results.to_json(LINK) | {"setup": {}}), "a field is missing"),
    ],
)
def test_what_is_no_report_is_refused(text: str, why: str, tmp_path: Path):
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(UsageError, match=why):
        results.read(tmp_path / "found.json")


@pytest.mark.parametrize("event", [Progress(1, 3, "mpi, 4 B"), Note("a line"), Finished(ALLREDUCE)])
def test_an_event_goes_through_a_line_of_text(event):
    line = events.encode(event)
    assert "\n" not in line
    assert events.decode(line) == event


@pytest.mark.parametrize("line", ["", "hello", "see hvdtrain-bench {}", "hvdtrain-bench "])
def test_other_lines_are_no_events(line: str):
    assert events.decode(line) is None
