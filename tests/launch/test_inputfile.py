"""Reading what the user names, whatever kind of file it is, without waiting or reading for ever."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hvdtrain.launch import inputfile


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_a_pipe_is_read_until_its_writer_is_done(fifo: Path) -> None:
    def write() -> None:
        with fifo.open("wb") as pipe:
            for part in (b"a:2\n", b"b" * 200_000):
                pipe.write(part)
                pipe.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert inputfile.read(fifo, idle_s=10) == b"a:2\n" + b"b" * 200_000
    writer.join()


@pytest.mark.parametrize("said", [None, b"a:2\n"])
def test_a_pipe_that_falls_silent_is_an_error_and_no_hang(fifo: Path, said: bytes | None) -> None:
    end = os.open(fifo, os.O_RDWR) if said is not None else -1  # None: nobody ever opens it for writing
    if said is not None:
        os.write(end, said)
    with pytest.raises(OSError) as caught:
        inputfile.read(fifo, idle_s=0.05)
    assert caught.value.strerror == "nothing came through it for 0.05 s, and it did not end"
    if said is not None:
        os.close(end)


def test_a_device_that_never_ends_is_an_error() -> None:
    with pytest.raises(OSError, match="it is larger than 16 MiB"):
        inputfile.read("/dev/zero")


def test_other_kinds(tmp_path: Path) -> None:
    assert inputfile.read(os.devnull) == b""
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    assert inputfile.read(tmp_path / "file") == b"x" * 3_000_000
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(kind):
            inputfile.read(path)
