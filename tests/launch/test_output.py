"""What people see, and what is written to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.launch.frames import Line
from hvdtrain.launch.output import Boxes, RankFiles, Style, Tracebacks

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


RULE = "-" * 74
PEER = [
    RULE,
    "An MPI communication peer process has unexpectedly disconnected.  This",
    "usually indicates a failure in the peer process (e.g., a crash or",
    "",
    "  Peer host:  node2",
    RULE,
]
ABORT = [RULE, "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD", "with errorcode 3.", RULE]
AROUND = [
    "[node1:04747] [[32373,0],0] ORTE_ERROR_LOG: Data unpack would read past end of buffer in file orte/util/show_help.c at line 507",
    "[node1:02158] PMIX ERROR: UNREACHABLE in file pmix_server.c at line 2198",
    "[node1:02158] 1 more process has sent help message help-mpi-btl-tcp.txt / peer hung up",
    '[node1:02158] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages',
]
OTHER = [RULE, "There are not enough slots available in the system to satisfy the 9", "slots", RULE]


@pytest.mark.parametrize(
    "told", [[*PEER, *ABORT], [*ABORT, *OTHER, *AROUND, *PEER], ["a", RULE, "b", *ABORT, "c"], [*OTHER, RULE]]
)
def test_known_boxes_of_a_launcher_are_kept_back_and_nothing_else(told: list[str]) -> None:
    boxes = Boxes()
    shown = [line for text in told for line in boxes.feed(text)] + boxes.rest()
    known = {*PEER, *ABORT, *AROUND} - {RULE}
    assert [line for line in shown if line != RULE] == [line for line in told if line not in known and line != RULE]
    assert sorted([*shown, *boxes.hidden]) == sorted(told)
    if OTHER[1] in told:
        assert shown[: len(OTHER)] == OTHER


def test_a_box_without_an_end_does_not_swallow_what_follows() -> None:
    boxes = Boxes()
    assert len([line for text in [*ABORT[:3], *["text"] * 100] for line in boxes.feed(text)]) > 70


def test_what_the_launcher_says_has_a_file(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 2)
    for text in ABORT:
        files.note(text)
    files.close()
    assert (tmp_path / "launcher").read_text().splitlines() == ABORT


def test_tracebacks_of_an_elastic_launcher_are_kept_back_but_for_what_they_say() -> None:
    told = [
        "Process 0 exit with status code 137.",
        "ERROR:root:failed to activate new hosts -> stop running",
        "Traceback (most recent call last):",
        '  File "registration.py", line 177, in _on_workers_recorded',
        "    self._driver.resume()",
        "TimeoutException: Timed out waiting. Timeout after 8 seconds.",
        "-" * 40,
        "Exception occurred during processing of request from ('127.0.0.1', 51292)",
        "Traceback (most recent call last):",
        '  File "socketserver.py", line 691, in process_request_thread',
        "BrokenPipeError: [Errno 32] Broken pipe",
        "Traceback (most recent call last):",
        '  File "horovodrun", line 6, in <module>',
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status. The first process to do so was:",
        "Process name: 127.0.0.1[0]",
        "Exit code: 137",
        "",
        "Timeout, server node2 not responding.",
    ]
    kept = Tracebacks()
    shown = [line for text in told for line in kept.feed(text)]
    assert shown == [told[0], told[1], told[5], told[-1]]
    assert len(kept.hidden) == len(told) - len(shown)
