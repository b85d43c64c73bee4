"""Children end with us, and what must not stop half-way does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.horovod.shell import run, search_path, stream


def test_output_and_code_come_back() -> None:
    result = run(["sh", "-c", "echo out; echo err >&2; exit 3"], apart=True)
    assert (result.code, result.output, result.errors, result.ok) == (3, "out\n", "err\n", False)


def test_nothing_can_be_asked() -> None:
    assert run(["sh", "-c", "read answer || echo nobody answers"]).output == "nobody answers\n"


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    result = run(["sh", "-c", "sleep 60 & echo $!; wait"], timeout_s=2.0)
    assert result.timed_out
    child = int(result.output)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_stream_shows_each_line_and_logs_it(tmp_path: Path) -> None:
    seen: list[str] = []
    with (tmp_path / "log").open("w") as log:
        code = stream(
            ["sh", "-c", "echo one; echo two >&2; exit 4"], env=os.environ, cwd=tmp_path, log=log, on_line=seen.append
        )
    assert (code, seen) == (4, ["one", "two"])
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_path_is_searched_as_if_the_environment_were_activated() -> None:
    assert search_path({"PATH": "/usr/bin"}).split(":")[1:] == ["/usr/bin"]
    assert Path(search_path().split(":")[0], "python").exists()


_INTERRUPTED = """
import sys
from hvdtrain.horovod.shell import run
print("ready", flush=True)
try:
    run(["sh", "-c", sys.argv[1]], shielded=sys.argv[2] == "shielded")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("mode", "finishes"), [("shielded", True), ("plain", False)])
def test_an_interrupt_ends_the_command_unless_it_is_shielded(mode: str, finishes: bool, tmp_path: Path) -> None:
    started, finished = tmp_path / "started", tmp_path / "finished"
    script = f"touch {started}; sleep 1; touch {finished}"
    process = subprocess.Popen([sys.executable, "-c", _INTERRUPTED, script, mode], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    time.sleep(0 if finishes else 1.2)
    assert finished.exists() == finishes
