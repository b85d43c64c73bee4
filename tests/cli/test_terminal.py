"""What is written while a job runs, to readers that stall, go, or cannot take it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hvdtrain.cli.inherited import OutputError
from hvdtrain.cli.terminal import Terminal


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)
    os.close(writes)


def test_a_reader_that_stalls_holds_nobody_up_and_gets_all_once_it_goes_on(pipe: tuple[int, int]) -> None:
    terminal = Terminal(pipe[1], 2)
    lines = [f"{number:07}" for number in range(200_000)]
    for line in lines:
        terminal.write(line)
    assert terminal.is_full()
    assert terminal.waiting() == [pipe[1]]
    read = b""
    while terminal.waiting() or len(read) < 8 * len(lines):
        read += os.read(pipe[0], 1 << 20)
        terminal.pump()
    assert read.decode().splitlines() == lines
    assert not terminal.is_full()


def test_what_a_stalled_reader_does_not_take_is_dropped_at_the_end(pipe: tuple[int, int]) -> None:
    terminal = Terminal(pipe[1], 2)
    for _ in range(3000):
        terminal.write("x" * 5000)  # more than is kept
    started = time.monotonic()
    terminal.hurry()
    terminal.finish()
    assert 0.5 < time.monotonic() - started < 3


def test_two_streams_in_one_pipe_keep_their_order(pipe: tuple[int, int]) -> None:
    terminal = Terminal(pipe[1], pipe[1])
    lines = [f"{number:07}" for number in range(20_000)]
    for number, line in enumerate(lines):
        terminal.write(line, is_error=bool(number % 2))
    read = b""
    while terminal.waiting():
        read += os.read(pipe[0], 1 << 20)
        terminal.pump()
    assert (read + os.read(pipe[0], 1 << 20)).decode().splitlines() == lines


def test_a_stalled_stdout_does_not_hold_up_stderr(pipe: tuple[int, int]) -> None:
    reads, writes = os.pipe()
    terminal = Terminal(pipe[1], writes)
    for _ in range(100):
        terminal.write("x" * 5000)
    terminal.write("error", is_error=True)
    assert os.read(reads, 100) == b"error\n"
    os.close(reads)
    os.close(writes)


def test_a_reader_that_has_gone_is_told_once() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    terminal = Terminal(writes, 2)
    with pytest.raises(OutputError) as caught:
        terminal.write("line")
    assert caught.value.is_unread
    terminal.write("line")
    terminal.finish()
    os.close(writes)


def test_a_full_disk_is_told_on_stderr_and_nothing_is_raised(pipe: tuple[int, int]) -> None:
    with open("/dev/full", "wb") as full:
        terminal = Terminal(full.fileno(), pipe[1])
        terminal.write("line")
        terminal.write("line")
        terminal.finish()
    said = os.read(pipe[0], 1000).decode()
    assert said == "Warning: standard output cannot be written to any more (No space left on device); the job goes on\n"
    with open("/dev/full", "wb") as full:
        terminal = Terminal(pipe[1], full.fileno())
        terminal.write("lost", is_error=True)
        terminal.write("line")
    assert os.read(pipe[0], 1000) == b"line\n"


#: A launcher that stops in order when it hears SIGUSR1, and writes without an end until then.
STOPS = """
import os, sys
from hvdtrain.cli.terminal import Terminal
from hvdtrain.launch import Command, frames, process
terminal = Terminal()
begun = b"".join(frames.encode(0, "here", "s", "")).decode().removesuffix(chr(10))
script = 'trap "exit 75" USR1; echo "$1"; while :; do echo $0; done'
command = Command(("/bin/sh", "-c", script, "x" * 1000, begun), passes_on=True)
show = lambda event, is_error: terminal.write(getattr(event, "text", "begun"))
code = process.run(command, os.environ, show, outlet=terminal, stop_s=20)
terminal.finish()
sys.exit(code)
"""


def test_a_stalled_reader_does_not_hold_up_a_stop_in_order() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        time.sleep(1)  # the buffers in between are full by then
        running.terminate()
        try:
            assert running.wait(timeout=10) == 75
        finally:
            running.kill()
