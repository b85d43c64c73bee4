"""What people see, and what is written to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.launch.frames import Line
from hvdtrain.launch.output import RankFiles, Style

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


def test_a_rank_that_says_nothing_has_empty_files(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 2)
    files.start(1)
    files.write(Line(0, "n", "out", "text"))
    files.start(0)  # its first line was quicker
    files.close()
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in sorted(tmp_path.glob("*/*"))}
    assert found == {"rank-0/stderr": "", "rank-0/stdout": "text\n", "rank-1/stderr": "", "rank-1/stdout": ""}


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
