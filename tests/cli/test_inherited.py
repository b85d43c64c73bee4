"""Whatever our standard streams and signals are when we are started: no traceback, and a faithful exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import inherited

RUN = f"{sys.executable} -m hvdtrain"
EXIT_7 = f"{RUN} run -np 1 --gloo -- sh -c 'echo line; echo error >&2; exit 7'"
NO_ROOM = b"standard output cannot be written to: No space left on device\nHint: is there room?\n"

#: what a shell is told -> exit code, what is seen on stdout and on stderr (None: whatever)
CASES: dict[str, tuple[int, bytes | None, bytes | None]] = {
    f"{RUN} --help > /dev/full": (1, b"", b"Error: " + NO_ROOM),
    f"{RUN} hosts convert hosts --to mpich > /dev/full": (1, b"", b"Error: " + NO_ROOM),
    f"{RUN} run -np 1 --gloo --dry-run -- true > /dev/full": (1, b"", None),
    f"{RUN} run --nope 2> /dev/full": (2, b"", b""),
    f"{RUN} hosts show nope 2>&-": (2, b"", b""),
    f"{RUN} --help >&-": (0, b"", b""),
    f"{RUN} --help | true; exit ${{PIPESTATUS[0]}}": (141, b"", b""),
    f"{EXIT_7} >&- 2>&- <&-": (7, b"", b""),
    f"{EXIT_7} > /dev/full": (7, b"", None),
    f"{EXIT_7} > /dev/full 2>&1": (7, b"", b""),
    f"trap '' CHLD; {EXIT_7}": (7, None, None),
    f"{RUN} run -np 1 --gloo -- sh -c 'echo line; sleep 0.5; yes' | true; exit ${{PIPESTATUS[0]}}": (141, b"", None),
    f"PYTHONIOENCODING=latin-1 {RUN} run -np 1 --gloo --no-prefix -- echo 'ü→'": (0, b"\xfc\\u2192\n", None),
    f"PYTHONIOENCODING=ascii {RUN} run -np 1 --gloo --dry-run -- echo 'ü→'": (0, None, None),
    f"{RUN} run -np 1 --gloo --dry-run -- echo $'\\xff' | grep -c $'\\xff'": (0, b"1\n", None),
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
def test_odd_streams_and_signals(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    code, out, err = CASES[line]
    assert done.returncode == code, done.stdout + done.stderr
    assert out is None or done.stdout == out
    assert err is None or done.stderr == err
    assert b"Traceback" not in done.stderr


def test_signals_that_were_blocked_come(tmp_path: Path) -> None:
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}); "
        "os.execv(sys.executable, [sys.executable, '-m', 'hvdtrain', 'run', '-np', '1', '--gloo', '--', 'sh', '-c', "
        "'echo ready; sleep 60'])"
    )
    running = subprocess.Popen([sys.executable, "-c", block], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert b"ready" in running.stdout.readline()
    running.terminate()
    running.communicate(timeout=10)
    assert running.returncode == 143


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp1252"])
@pytest.mark.parametrize("text", ["→", "\udcff", "ü\udcff→\udc80"])
def test_every_text_has_bytes_in_every_encoding(text: str, encoding: str) -> None:
    assert text.encode(encoding, inherited.LENIENT)
    assert b"a\xff".decode("ascii", inherited.LENIENT) == "a\\xff"


def test_a_stream_that_is_set_not_to_block_gets_everything() -> None:
    script = (
        "import os; os.set_blocking(1, False); from hvdtrain.cli import inherited; inherited.prepare(is_rank=False); "
        "print('x' * 1_000_000, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30, check=True)
    assert done.stdout == b"x" * 1_000_000 + b"\n"
