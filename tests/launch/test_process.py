"""Running a command: exit codes, signals, nothing left behind. With real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Command, frames, process

RUNNER = """
import os, sys
from hvdtrain.launch import Command, process
sys.exit(process.run(Command(tuple(sys.argv[1:])), os.environ, lambda event, is_error: print(event)))
"""

#: A stand-in for a launcher: two children, each writes its pid; how it takes SIGTERM is up to it.
LAUNCHER = """
trap '{trap}' TERM
sleep 1000 & echo $! > "$0.a"
sleep 1000 & echo $! > "$0.b"
wait; wait; exit 3
"""


def run(command: Command) -> int:
    return process.run(command, os.environ, lambda event, is_error: None)


def start(tmp_path: Path, trap: str, *before: str, shell: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    script = textwrap.dedent(LAUNCHER.format(trap=trap))
    argv = [*before, sys.executable, "-c", RUNNER, *shlex.split(shell), "/bin/sh", "-c", script, str(tmp_path / "pid")]
    running = subprocess.Popen(argv, cwd=Path(process.__file__).parents[2])
    deadline = time.monotonic() + 20
    files = [tmp_path / "pid.a", tmp_path / "pid.b"]
    while not all(path.exists() and is_sleep(path.read_text().strip()) for path in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return running, [int(path.read_text()) for path in files]


def is_sleep(pid: str) -> bool:
    """Whether the child is what it is to be: before that, it is a shell that has its parent's trap and swallows a signal."""
    return bool(pid) and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -11 $$", 139)])
def test_the_exit_code_is_faithful(script: str, code: int) -> None:
    assert run(Command(("/bin/sh", "-c", script))) == code


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(HvdtrainError, match="cannot start /nope/mpirun: No such file or directory"):
        run(Command(("/nope/mpirun",)))


def test_output_comes_as_it_is_written_and_errors_are_marked() -> None:
    seen: list[tuple[float, str, bool]] = []

    def on_event(event: frames.Event, is_error: bool) -> None:
        assert isinstance(event, frames.Note)
        seen.append((time.monotonic(), event.text, is_error))

    script = "echo first; sleep 0.6; echo second >&2; printf third"
    assert process.run(Command(("/bin/sh", "-c", script)), os.environ, on_event) == 0
    assert [(text, is_error) for _, text, is_error in seen] == [("first", False), ("second", True), ("third", False)]
    assert seen[1][0] - seen[0][0] > 0.4


def test_a_child_that_holds_the_output_open_does_not_hold_us() -> None:
    started = time.monotonic()
    assert run(Command(("/bin/sh", "-c", "sleep 60 & exit 5"))) == 5
    assert time.monotonic() - started < 10


def test_what_the_observer_raises_ends_the_job(tmp_path: Path) -> None:
    def on_event(event: frames.Event, is_error: bool) -> None:
        raise HvdtrainError("enough")

    script = f"echo $$ > {tmp_path}/pid; echo line; exec sleep 60"
    with pytest.raises(HvdtrainError, match="enough"):
        process.run(Command(("/bin/sh", "-c", script)), os.environ, on_event)
    assert gone([int((tmp_path / "pid").read_text())], 2)


def test_the_observer_can_set_a_time_for_the_end() -> None:
    started = time.monotonic()
    code = process.run(Command(("/bin/sh", "-c", "echo failed; exec sleep 60")), os.environ, lambda event, is_error: 0.5)
    assert code == 143
    assert 0.4 < time.monotonic() - started < 5


#: A launcher that has much to say when it is told to end (more than a pipe holds), and then ends in its own way.
WORDY = """
trap 'i=0; while [ $i -lt 4000 ]; do echo "last words, last words, last words, last words"; i=$((i+1)); done; touch "$0"; exit 7' TERM
echo failed
while :; do sleep 0.05; done
"""


def test_a_launcher_can_get_rid_of_its_last_words(tmp_path: Path) -> None:
    seen: list[frames.Event] = []

    def on_event(event: frames.Event, is_error: bool) -> float:
        seen.append(event)
        return 0.1

    assert process.run(Command(("/bin/sh", "-c", WORDY, str(tmp_path / "end"))), os.environ, on_event) == 7
    assert len(seen) == 4001


def test_a_launcher_can_get_rid_of_its_last_words_when_the_observer_has_failed(tmp_path: Path) -> None:
    def on_event(event: frames.Event, is_error: bool) -> None:
        raise HvdtrainError("enough")

    with pytest.raises(HvdtrainError, match="enough"):
        process.run(Command(("/bin/sh", "-c", WORDY, str(tmp_path / "end"))), os.environ, on_event)
    assert (tmp_path / "end").exists()


def test_a_launcher_that_does_not_listen_is_killed_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", 0.3)
    monkeypatch.setattr(process, "_LAUNCHERS_OWN_S", 0.3)
    started = time.monotonic()
    script = "trap '' TERM; echo failed; while :; do sleep 0.05; done"
    assert process.run(Command(("/bin/sh", "-c", script)), os.environ, lambda event, is_error: 0.1) == 137
    assert 0.3 < time.monotonic() - started < 4


def test_a_launcher_that_closes_its_output_is_waited_for() -> None:
    assert run(Command(("/bin/sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 7"))) == 7


def test_what_is_known_at_a_signal_is_asked_for_before_the_launcher_hears_of_it() -> None:
    seen: list[str] = []

    def on_event(event: frames.Event, is_error: bool) -> None:
        assert isinstance(event, frames.Note)
        seen.append(event.text)
        if event.text == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    script = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    code = process.run(Command(("/bin/sh", "-c", script)), os.environ, on_event, on_signal=lambda: seen.append("signal"))
    assert code == 143
    assert seen == ["ready", "signal", "told"]


def test_files_are_written_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "launch" / "hosts"
    assert run(Command(("/bin/sh", "-c", f"grep -q 'a:2' {path}"), files={str(path): "a:2\n"})) == 0


def test_a_clean_environment_holds_nothing_but_what_it_is_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = Command(("/bin/sh", "-c", f"/usr/bin/env > {out}"), {"ONLY": "a b\nc"}, inherit=False)
    assert process.run(command, {"LEAK": "1"}, lambda event, is_error: None) == 0
    assert "ONLY=a b\nc\n" in out.read_text()
    assert "LEAK" not in out.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_launcher_and_all_its_children(number: signal.Signals, code: int, tmp_path: Path) -> None:
    running, pids = start(tmp_path, "exit 1")
    running.send_signal(number)
    assert running.wait(timeout=5) == code
    assert gone(pids, 2)


def test_a_second_signal_kills_a_launcher_that_does_not_listen(tmp_path: Path) -> None:
    running, pids = start(tmp_path, ":")
    running.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=3) == 130
    assert gone(pids, 2)


def test_when_we_are_killed_the_launcher_is_told_by_the_kernel(tmp_path: Path) -> None:
    running, pids = start(tmp_path, "kill $(cat $0.a $0.b); exit 1")
    running.kill()
    running.wait()
    assert gone(pids, 3)


def test_when_we_are_killed_a_launcher_below_a_shell_is_told_too(tmp_path: Path) -> None:
    """As horovodrun's: the shell takes the kernel's signal and keeps it to itself."""
    running, pids = start(tmp_path, "kill $(cat $0.a $0.b); exit 1", "/usr/bin/env", shell="/bin/sh -c '\"$@\"; exit $?' sh")
    running.kill()
    running.wait()
    assert gone(pids, 3)


def test_hang_up_is_ignored_under_nohup(tmp_path: Path) -> None:
    running, pids = start(tmp_path, "exit 1", "nohup")
    running.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert running.poll() is None
    assert all(map(alive, pids))
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=5) == 143


def test_ctrl_c_in_a_script_does_not_end_a_job_in_its_background(tmp_path: Path) -> None:
    """A shell that runs a script starts ``command &`` with SIGINT ignored; a later Ctrl-C on ``tail -f`` is not for the job."""
    running, pids = start(tmp_path, "exit 1", "/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    running.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert running.poll() is None
    assert all(map(alive, pids))
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=5) == 143


def watcher_of(pid: int) -> int:
    """Our process's child that is a copy of it."""
    return next(
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if Path(f"/proc/{child}/cmdline").read_bytes() == Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_watcher_that_was_killed_or_stopped_does_not_hold_up_the_end(number: signal.Signals, tmp_path: Path) -> None:
    running, pids = start(tmp_path, "exit 1")
    watcher = watcher_of(running.pid)
    os.kill(watcher, number)
    running.terminate()
    assert running.wait(timeout=5) == 143
    assert gone([*pids, watcher], 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_ends_politely(number: signal.Signals, tmp_path: Path) -> None:
    running, pids = start(tmp_path, "touch $0.end; kill $(cat $0.a $0.b); exit 1")
    os.kill(int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGSTOP)
    running.send_signal(number)
    running.wait(timeout=5)
    assert gone(pids, 3)
    deadline = time.monotonic() + 3
    while not (tmp_path / "pid.end").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


#: A launcher whose "rank" says that it has begun, and what it hears.
RANK = """
import signal, sys, time
from hvdtrain.launch import frames
code = [9]
signal.signal(signal.SIGUSR1, lambda *_: code.__setitem__(0, int(sys.argv[1])))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
if sys.argv[2] == "begins":
    sys.stdout.buffer.write(b"".join(frames.encode(0, "here", "s", "")))
    sys.stdout.flush()
print("ready", flush=True)
while code[0] in (9, 8):
    time.sleep(0.02)
sys.exit(code[0])
"""

ASKED = """
import os, sys
from hvdtrain.launch import Command, process
asked = []
code = process.run(
    Command((sys.executable, "-c", sys.argv[1], *sys.argv[2:4]), passes_on=True), os.environ,
    lambda event, is_error: print(event, flush=True), stop_s=float(sys.argv[4]), on_asked=lambda: asked.append(1),
)
print("asked", len(asked), flush=True)
sys.exit(code)
"""


def ask(heard: int, begins: str, stop_s: float, *numbers: int) -> tuple[int, str]:
    argv = [sys.executable, "-c", ASKED, RANK, str(heard), begins, str(stop_s)]
    with subprocess.Popen(argv, cwd=Path(process.__file__).parents[2], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        text = ""
        while "ready" not in text:
            text += running.stdout.readline()
        for number in numbers:
            running.send_signal(number)
            time.sleep(0.2)
        text += running.communicate(timeout=20)[0]
    return running.returncode, text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_know_it_are_asked_to_stop_in_order(number: int) -> None:
    code, text = ask(75, "begins", 10, number)
    assert (code, text.rpartition("asked ")[2]) == (75, "1\n")


def test_what_does_not_stop_in_order_in_time_is_ended() -> None:
    started = time.monotonic()
    assert ask(8, "begins", 1, signal.SIGTERM)[0] == 143
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_second_signal_does_not_wait_for_the_order(second: int, code: int) -> None:
    assert ask(8, "begins", 60, signal.SIGTERM, signal.SIGUSR1, second)[0] == code


def test_where_no_rank_has_begun_there_is_nothing_to_wait_for() -> None:
    assert ask(8, "", 60, signal.SIGTERM)[0] == 143


def test_a_program_gets_the_users_own_signal() -> None:
    code, text = ask(5, "begins", 0, signal.SIGUSR1)
    assert (code, text.rpartition("asked ")[2]) == (5, "0\n")
