"""What people see, and what is written to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.launch import Host
from hvdtrain.launch.failures import Failure
from hvdtrain.launch.frames import Ended, Line, Note, Started
from hvdtrain.launch.output import RankFiles, Style
from hvdtrain.launch.watch import Watch

LINE = Line(3, "node2", "out", "loss 0.5")


def test_a_line_begins_with_its_rank_and_host() -> None:
    assert Style(4).render(LINE) == "[3 node2] loss 0.5"
    assert Style(100).render(LINE) == "[ 3 node2] loss 0.5"
    assert Style(4, prefix=False).render(LINE) == "loss 0.5"
    assert Style(4, timestamps=True).render(LINE, 0.0)[2:].startswith(":")
    assert Style(4, prefix=False, timestamps=True).render(LINE, 0.0).endswith(" loss 0.5")


def test_ranks_differ_in_colour_and_text_does_not() -> None:
    coloured = {Style(4, colour=True).render(Line(rank, "n", "out", "x")).partition("[0m")[0] for rank in range(4)}
    assert len({text.partition("m")[0] for text in coloured}) == 4


def test_quiet_ranks_shows_the_primary_only() -> None:
    style = Style(4, only_primary=True)
    assert [style.shows(Line(rank, "n", "out", "x")) for rank in range(3)] == [True, False, False]


def test_files_are_named_so_that_they_sort(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 300)
    for rank in range(300):  # more than are held open at once
        files.write(Line(rank, "n", "out", "first"))
    for rank in (0, 299):
        files.write(Line(rank, "n", "out", "second"))
        files.write(Line(rank, "n", "err", "warning"))
    files.close()
    assert [path.name for path in sorted(tmp_path.iterdir())][:3] == ["rank-000", "rank-001", "rank-002"]
    assert (tmp_path / "rank-000" / "stdout").read_text() == "first\nsecond\n"
    assert (tmp_path / "rank-299" / "stderr").read_text() == "warning\n"
    assert RankFiles(tmp_path, 2).path(1, "out").parent.name == "rank-1"


HOSTS = (Host("node1", 1), Host("node2", 2))


def test_a_failure_is_known_from_the_relay_alone() -> None:
    watch = Watch(HOSTS)
    watch.see(Line(2, "node2", "out", "step 7"))
    watch.see(Ended(0, "node1", {"code": 1, "told": 0, "time": 12.0, "error": "ConnectionError"}))
    watch.see(Ended(2, "node2", {"code": 137, "told": 0, "time": 11.0, "error": "killed by signal 9 (SIGKILL)"}))
    watch.see(Ended(1, "node2", {"code": 143, "told": 15, "time": 10.0, "error": "killed by signal 15"}))
    first, second = watch.failures(None, 0.0)
    assert first == Failure(2, 11.0, "node2", "", "killed by signal 9 (SIGKILL); the last line it wrote: step 7", exit_code=137)
    assert (second.rank, second.exit_code) == (0, 1)


def test_files_of_an_earlier_run_are_not_this_runs_failures(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text('{"rank": 1, "time": 5.0, "error": "old"}')
    assert Watch(HOSTS).failures(tmp_path, 6.0) == []
    assert [failure.error for failure in Watch(HOSTS).failures(tmp_path, 4.0)] == ["old"]


def test_ranks_that_are_not_where_they_were_planned_are_noticed() -> None:
    watch = Watch(HOSTS)
    watch.see(Started(0, "pod-a", {}))
    watch.see(Started(1, "pod-b", {}))
    assert watch.misplaced() == ""
    watch.see(Started(2, "pod-b", {}))
    assert watch.misplaced() == ""
    alone = Watch(HOSTS)
    for rank in range(3):
        alone.see(Started(rank, "launcher", {}))
    assert alone.misplaced() == "hosts seen: 1 of 2 planned (launcher)"
    more = Watch(HOSTS)
    for rank in (0, 1, 2, 3):
        more.see(Started(rank, f"node{1 + (rank > 0)}", {}))
    assert more.misplaced() == "rank 3 started, but 3 ranks were planned"


def test_who_is_silent_and_who_never_came_is_known() -> None:
    watch = Watch(HOSTS)
    watch.see(Started(0, "node1", {}))
    watch.see(Started(1, "node2", {}))
    watch.see(Ended(0, "node1", {"code": 1, "told": 15}))
    watch.see(Note("ORTE has lost communication"))
    assert watch.silent() == ["rank 1 on node2"]
    assert watch.silent_hosts() == ["node2"]
    assert Watch(HOSTS).silent_hosts() == []
    assert watch.never_started() == ["rank 2 on node2"]
    assert list(watch.notes) == ["ORTE has lost communication"]


def test_files_that_cannot_be_written_are_given_up_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    files = RankFiles(tmp_path / "file", 2)
    for rank in (0, 1, 0):
        files.write(Line(rank, "node1", "out", "text"))
    files.close()
    assert caplog.text.count("is not written to") == 1


def test_what_tensorflow_writes_at_every_import_is_not_shown() -> None:
    style = Style(2)
    noise = "I0000 00:00:1796030805.271820   16614 port.cc:153] oneDNN custom operations are on. You may see"
    assert not style.shows(Line(0, "node1", "err", noise))
    assert style.shows(Line(0, "node1", "err", "I0000 00:00:1796030805.27 1 gpu.cc:1] something else"))
