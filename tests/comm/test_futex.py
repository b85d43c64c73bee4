"""Sleeping on a number in shared memory until another process changes it and says so."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm import futex
from hvdtrain.comm.shared import HostMemory
from tests.comm.test_shared import memory, together

linux = pytest.mark.skipif(sys.platform != "linux", reason="futexes are Linux's")


def number(path: Path) -> tuple[Any, int]:
    """The 8-byte number that a file begins with, as shared memory, and its address."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    held = ctypes.c_int64.from_buffer(mapped)
    return held, ctypes.addressof(held)


@linux
def test_another_process_wakes_who_sleeps(tmp_path):
    path = tmp_path / "number"
    path.write_bytes(bytes(4096))
    program = (
        "import sys; from pathlib import Path; from hvdtrain.comm import futex; from tests.comm.test_futex import number\n"
        "held, address = number(Path(sys.argv[1])); print('there', flush=True); sys.stdin.readline()\n"
        "held.value = 7; futex.wake(address)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    held, address = number(path)
    assert other.stdout is not None
    assert other.stdout.readline() == "there\n"
    assert other.stdin is not None
    other.stdin.write("\n")
    other.stdin.flush()
    until = time.monotonic() + 60
    while held.value == 0 and time.monotonic() < until:
        assert futex.wait(address, 0, 60.0)
    assert held.value == 7
    other.communicate()


@linux
def test_nobody_sleeps_on_a_number_that_has_changed_or_for_longer_than_asked(tmp_path):
    path = tmp_path / "number"
    path.write_bytes(bytes(4096))
    held, address = number(path)
    held.value = (1 << 40) + 3
    assert futex.wait(address, (1 << 40) + 2, 3600.0)
    assert futex.wait(address, (1 << 40) + 3, 0.001)


def test_ranks_meet_where_nobody_can_be_woken(tmp_path, monkeypatch):
    monkeypatch.setattr(futex, "_NUMBER", 0)
    monkeypatch.setattr("hvdtrain.comm.shared._SPIN_S", 0.0)
    _meet_many_times(tmp_path)


def test_ranks_that_never_spin_meet(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.comm.shared._SPIN_S", 0.0)
    _meet_many_times(tmp_path)


def _meet_many_times(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        mine: HostMemory = memory(tmp_path / "memory", rank, 3)
        rows = mine.arrays[0]
        for step in range(200):
            rows[rank][:] = step
            mine.meet("the rows with")
            assert [row[0] for row in rows] == [step] * 3
            mine.meet("the next rows with")

    together(3, body)
