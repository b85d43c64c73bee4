"""Files in /dev/shm that nobody will use again."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.launch import leftovers

SEMAPHORE, SEGMENT = "sem.mp-0a_b1c2d", "vader_segment.node-1.0.5dbf0001.2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "_sees_all_processes", lambda: True)
    for name in (SEMAPHORE, SEGMENT, "sem.mine", "sem.mp-short", "data", "vader_segment.x"):
        (tmp_path / name).write_bytes(bytes(4096))
        os.utime(tmp_path / name, (1, 1))
    monkeypatch.setattr(leftovers, "_YOUNG_S", -1.0)
    return tmp_path


def test_what_nobody_has_in_its_memory_is_removed_and_nothing_else(folder: Path) -> None:
    assert leftovers.remove(folder) == (2, 8192)
    assert {path.name for path in folder.iterdir()} == {"sem.mine", "sem.mp-short", "data", "vader_segment.x"}


def test_what_a_process_has_in_its_memory_stays(folder: Path) -> None:
    with (folder / SEMAPHORE).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert [path.name for path in leftovers.found(folder)] == [SEGMENT]
    code = f"import mmap, sys; f = open({str(folder / SEGMENT)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert [path.name for path in leftovers.found(folder)] == [SEMAPHORE]
        other.communicate(b"\n")


def test_what_is_new_or_anothers_or_no_file_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_YOUNG_S", 60.0)
    assert leftovers.found(folder) == []  # they were made just now, whatever their time of writing says
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert len(leftovers.found(folder)) == 2
    (folder / "sem.mp-12345678").symlink_to(folder / "data")
    assert len(leftovers.found(folder)) == 2
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert leftovers.found(folder) == []


@pytest.mark.parametrize(
    ("status", "count"),
    [
        ("Name:\tpython3\nUid:\t4242\t4242\t4242\t4242\n", 0),
        ("Name:\tdaemon\nUid:\t0\t0\t4242\t0\n", 0),
        (None, 0),
        ("Name:\tdaemon\nUid:\t0\t0\t0\t0\n", 2),
    ],
)
def test_of_a_process_that_refuses_its_status_says_whether_it_is_ours(
    status: str | None, count: int, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = tmp_path_factory.mktemp("proc")
    (processes / "77" / "maps").mkdir(parents=True)  # reading it fails; the folder's owner is another one
    if status is not None:
        (processes / "77" / "status").write_text(status)
    files = leftovers._old(folder)
    monkeypatch.setattr(leftovers, "_old", lambda _: files)
    monkeypatch.setattr(leftovers, "_PROCESSES", processes)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert len(leftovers.found(folder)) == count


def test_where_not_all_processes_can_be_seen_nothing_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_used", lambda: None)
    assert leftovers.remove(folder) == (0, 0)
    monkeypatch.undo()
    monkeypatch.setattr(leftovers, "_YOUNG_S", -1.0)
    monkeypatch.setattr(leftovers, "_sees_all_processes", lambda: False)
    assert leftovers.remove(folder) == (0, 0)
