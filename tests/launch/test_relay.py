"""The relay around a rank: with real processes, as a launcher starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch import START_FILE, Host, Job, frames, linux, relay, start_argv
from hvdtrain.launch.frames import Ended, Line, Started, words_line

START = [*start_argv(sys.executable), "relay"]
QUIET = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}


def popen(
    *argv: str, slots: str = "2,1", rank: int = 0, env: Mapping[str, str] | None = None, more: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    environ = {**QUIET, "OMPI_COMM_WORLD_RANK": str(rank), **(env or {})}
    return subprocess.Popen(
        [*START, "--slots", slots, *more, "--", *argv], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(running: subprocess.Popen[bytes], timeout: float = 20) -> tuple[int, list[frames.Event]]:
    out, err = running.communicate(timeout=timeout)
    assert err == b""
    decoder = frames.Decoder()
    return running.returncode, [*decoder.feed(out), *decoder.close()]


def sh(script: str, **more: Any) -> tuple[int, list[frames.Event]]:
    return finish(popen("/bin/sh", "-c", script, **more))


def ended(events: list[frames.Event]) -> Mapping[str, Any]:
    assert isinstance(events[-1], Ended)
    return events[-1].info


def lines(events: list[frames.Event]) -> list[tuple[str, str]]:
    return [(event.stream, event.text) for event in events if isinstance(event, Line)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_lines_of_both_streams_carry_rank_and_host() -> None:
    code, events = sh("echo one; echo two >&2; printf three", rank=2)
    assert code == 0
    assert isinstance(events[0], Started)
    assert sorted(lines(events)) == [("err", "two"), ("out", "one"), ("out", "three")]
    assert {(event.rank, event.host) for event in events if not isinstance(event, frames.Note)} == {(2, socket.gethostname())}
    assert ended(events)["code"] == 0


def test_pieces_of_a_line_are_one_line_and_progress_is_marked() -> None:
    code, events = sh("printf a; sleep 0.2; printf 'b\\n10%%\\r20%%\\r'; sleep 0.2; printf '\\nend\\r\\n\\n'")
    assert code == 0
    assert [(event.text, event.progress) for event in events if isinstance(event, Line)] == [
        ("ab", False),
        ("10%", True),
        ("20%", False),
        ("end", False),
        ("", False),
    ]


def test_output_without_an_end_of_line_is_shown_before_it_fills_the_memory() -> None:
    writer = "import os\nfor _ in range(30000): os.write(1, b'x' * 104)\nos.write(1, b'end')"
    code, events = finish(popen(sys.executable, "-c", writer))
    assert code == 0
    assert "".join(text for _, text in lines(events)) == "x" * 3_120_000 + "end"
    assert max(len(text) for _, text in lines(events)) < 1_200_000


def test_four_ranks_that_write_in_pieces_give_whole_lines() -> None:
    writer = (
        "import os, sys\n"
        "for number in range(1000):\n"
        "    text = f'{number:04} ' + 'x' * 194 + '\\n'\n"
        "    for at in range(0, 200, 67): os.write(1, text[at:at + 67].encode())\n"
    )
    running = [popen(sys.executable, "-c", writer, slots="4", rank=rank) for rank in range(4)]
    for each in running:
        code, events = finish(each, timeout=60)
        assert code == 0
        assert lines(events) == [("out", f"{number:04} " + "x" * 194) for number in range(1000)]


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -11 $$", 139)])
def test_the_exit_code_and_the_reason_are_told(script: str, code: int) -> None:
    returned, events = sh(f"echo one >&2; echo 'ValueError: two' >&2; {script}")
    assert returned == code
    info = ended(events)
    assert info["code"] == code
    assert info["traceback"] == "one\nValueError: two"
    assert info["error"].startswith("exit code 7: ValueError: two" if code == 7 else f"killed by signal {code - 128} (SIG")


WORDS = {"rank": 1, "phase": "train", "error": "ValueError: x", "traceback": "Traceback\n  line \x1e", "exit_code": 2}


def say(record: Mapping[str, Any], folder: Path) -> str:
    """What a rank's shell says as its last words, behind what somebody else has begun to write."""
    (folder / "words").write_text(words_line(record))
    return f"printf 'loading 10%%' >&2; cat {folder}/words >&2"


def test_the_ranks_own_last_words_win_and_are_not_output(tmp_path: Path) -> None:
    code, events = sh(f"{say(WORDS, tmp_path)}; echo Error >&2; exit 3", rank=1)
    assert code == 3
    assert {**WORDS, "code": 3, "told": 0}.items() <= ended(events).items()
    assert lines(events) == [("err", "loading 10%"), ("err", "Error")]


def test_last_words_that_are_torn_are_output(tmp_path: Path) -> None:
    torn = words_line(WORDS)[:40]
    (tmp_path / "torn").write_text(f"{torn}\n")
    code, events = sh(f"cat {tmp_path}/torn >&2; exit 3")
    assert (code, ended(events)["code"]) == (3, 3)
    assert lines(events) == [("err", torn.replace("\x1e", "?"))]


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_failed_before_it_was_told_to_end_has_failed(before: bool, tmp_path: Path) -> None:
    """As one that has aborted the job: its launcher tells it to end, too, before it is gone."""
    record = {**WORDS, "time": time.time() + (0 if before else 1000)}
    script = f"{say(record, tmp_path)}; trap 'exit 3' TERM; echo $$ > {tmp_path}/rank; while :; do sleep 0.05; done"
    running = popen("/bin/sh", "-c", script)
    wait_for(tmp_path / "rank")
    running.send_signal(signal.SIGTERM)
    code, events = finish(running)
    assert code == 3
    assert ended(events)["told"] == (0 if before else signal.SIGTERM)


def test_a_program_that_is_not_there_is_named_with_its_folder() -> None:
    code, events = finish(popen("/nope/python", "x"))
    assert code == 127
    assert ended(events)["error"] == f"cannot start /nope/python: No such file or directory (in {os.getcwd()})"
    assert ended(events)["hint"] == ""


@pytest.mark.parametrize("folder", ["", "./"])
def test_a_script_that_is_started_without_its_interpreter_gets_a_hint(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("print(1)\n")
    code, events = finish(popen(f"{folder}loop.py"))
    assert code == (126 if folder else 127)
    assert ended(events)["hint"] == f"a script needs its interpreter: -- python {folder}loop.py"


def test_arguments_and_environment_arrive_unchanged() -> None:
    hard = ["--", "--slots", "", "a b", "$HOME", "'\"", "new\nline", "ünï"]
    env = {"VALUE": " two\nlines '\"$x ", "BASH_FUNC_mod%%": "() { echo 'a b'; }", "FOO.BAR": "1"}
    show = "import os, sys; print(ascii(sys.argv[1:])); print(ascii([os.environ.get(k) for k in ('VALUE', 'BASH_FUNC_mod%%', 'FOO.BAR')]))"
    code, events = finish(popen(sys.executable, "-c", show, *hard, env=env))
    assert code == 0
    assert lines(events) == [("out", ascii(hard)), ("out", ascii(list(env.values())))]


def relay_below(pid: int) -> int:
    """The relay itself, below its keeper."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.mark.parametrize("how", ["end", "kill the keeper", "kill the relay", "close"])
def test_however_it_goes_the_rank_and_its_children_go_too(how: str, tmp_path: Path) -> None:
    """Children that left the session (daemons, loader workers) included, with an environment of their own."""
    script = f"setsid env -i sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/rank; while :; do sleep 0.1; done"
    running = popen("/bin/sh", "-c", script)
    pids = [int(wait_for(tmp_path / name)) for name in ("child", "rank")]
    if how == "close":
        assert running.stdout is not None
        running.stdout.close()
    elif how == "end":
        running.terminate()
    else:
        os.kill(running.pid if how == "kill the keeper" else relay_below(running.pid), signal.SIGKILL)
    running.wait(timeout=10)
    assert gone(pids[1], 3)
    assert gone(pids[0], 3)
    for stream in (running.stdout, running.stderr):
        assert stream is not None
        stream.close()


def test_a_relay_that_was_killed_is_told_as_the_ranks_end(tmp_path: Path) -> None:
    running = popen("/bin/sh", "-c", f"echo $$ > {tmp_path}/rank; exec sleep 1000")
    wait_for(tmp_path / "rank")
    os.kill(relay_below(running.pid), signal.SIGKILL)
    code, events = finish(running)
    assert code == 137
    assert ended(events)["error"].startswith("its relay was killed by signal 9")
    assert ended(events)["told"] == 0


def start_with_child(tmp_path: Path) -> tuple[subprocess.Popen[bytes], int, list[int]]:
    """A rank with a child that has left its session: the keeper, the relay's number, and those of the two."""
    running = popen("/bin/sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/rank; wait")
    pids = [int(wait_for(tmp_path / name)) for name in ("rank", "child")]
    return running, relay_below(running.pid), pids


def test_a_keeper_that_was_killed_is_told_as_the_ranks_end(tmp_path: Path) -> None:
    running, _, _ = start_with_child(tmp_path)
    running.kill()
    _, events = finish(running)
    info = ended(events)
    assert (info["code"], info["told"], info["follows"]) == (137, 0, True)
    assert info["error"].startswith("its relay was killed by signal 9")


def test_signals_that_come_with_the_relays_death_save_nobody(tmp_path: Path) -> None:
    """As when a whole host's launcher is killed: the kernel tells the keeper while it loses its relay."""
    running, relay_pid, pids = start_with_child(tmp_path)
    running.send_signal(signal.SIGSTOP)
    os.kill(relay_pid, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        running.send_signal(number)
    code, events = finish(running)
    assert (code, ended(events)["told"]) == (137, signal.SIGINT)
    assert all(gone(pid, 1) for pid in pids)


@pytest.mark.parametrize("stopped", ["relay", "relay and keeper"])
def test_what_is_stopped_ends_all_the_same(stopped: str, tmp_path: Path) -> None:
    running, relay_pid, pids = start_with_child(tmp_path)
    os.kill(relay_pid, signal.SIGSTOP)
    if stopped == "relay":
        running.terminate()
    else:
        running.send_signal(signal.SIGSTOP)
        running.terminate()
        running.kill()
    finish(running)
    assert all(gone(pid, 3) for pid in [*pids, relay_pid])


STUBBORN = """
import signal, sys, time
from hvdtrain.launch import keeper
keeper._WORKERS_OWN_S = 0.2
def work(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    print("ready", flush=True)
    time.sleep(1000)
sys.exit(keeper.keep(work, lambda number, told: print(number, told, flush=True), grace_s=0.2))
"""


def test_a_relay_that_does_not_end_is_killed_by_its_keeper() -> None:
    running = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.terminate()
    assert running.communicate(timeout=5)[0] == "9 15\n"
    assert running.returncode == 137


def test_signals_without_a_meaning_of_ours_reach_the_rank(tmp_path: Path) -> None:
    running = popen("/bin/sh", "-c", f"trap 'exit 5' USR1; echo $$ > {tmp_path}/rank; while :; do sleep 0.05; done")
    wait_for(tmp_path / "rank")
    running.send_signal(signal.SIGUSR1)
    code, events = finish(running)
    assert code == 5
    assert ended(events)["told"] == 0


def test_when_the_launchers_daemon_is_killed_the_kernel_tells_the_relay(tmp_path: Path) -> None:
    inner = " ".join([*START, "--slots", "1", "--", "/bin/sh", "-c", f"'echo $$ > {tmp_path}/rank; sleep 1000'"])
    daemon = subprocess.Popen(["/bin/sh", "-c", f"{inner} > {tmp_path}/out & wait"], env=QUIET)
    pid = int(wait_for(tmp_path / "rank"))
    daemon.kill()
    daemon.wait()
    assert gone(pid, 5)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/rank; while :; do sleep 0.1; done"
    running = popen("/bin/sh", "-c", script, more=("--grace", "1.5"))
    wait_for(tmp_path / "rank")
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    code, events = finish(running)
    assert code == 137
    assert ended(events)["told"] == signal.SIGTERM
    assert 1.4 < time.monotonic() - started < 10


def test_a_polite_end_is_not_a_failure_of_the_rank(tmp_path: Path) -> None:
    running = popen("/bin/sh", "-c", f"echo $$ > {tmp_path}/rank; exec sleep 1000")
    wait_for(tmp_path / "rank")
    running.send_signal(signal.SIGTERM)
    code, events = finish(running)
    assert code == 143
    assert ended(events)["told"] == signal.SIGTERM


def test_the_relay_starts_fast_because_it_imports_little() -> None:
    check = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('numpy', 'torch', 'click', 'psutil', 'mpi4py')))"
    code = (
        "import sys, types; p = types.ModuleType('hvdtrain'); "
        f"p.__path__ = [{str(Path(START_FILE).parents[1])!r}]; sys.modules['hvdtrain'] = p; import hvdtrain.launch.relay; {check}"
    )
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_refused_rank_says_so_and_starts_nothing() -> None:
    code, events = sh("echo started", slots="4", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert code == 2
    assert lines(events) == []
    assert ended(events)["hint"] == "lower the host's slots, or add --share-devices"


def test_wrapping_a_job_is_pure_and_keeps_its_argv() -> None:
    job = Job(("train", "a b", ""), (Host("a", 2, devices=(0, 3)), Host("b", 1)), 3)
    wrapped = relay.wrap(job, start=("/py", "/pkg/start.py"), share_devices=True)
    assert wrapped.argv == (
        *("/py", "/pkg/start.py", "relay", "--slots", "2,1", "--devices", "0,3;"),
        *("--share-devices", "--", "train", "a b", ""),
    )
    assert (wrapped.tagged, job.tagged) == (True, False)


WORDS_OF_LAUNCHERS = ["-x", "--mca", ":", "@file", "=", "==x", "--", "-", ":x", "a=b", "", "=-x"]


def test_no_word_of_the_program_looks_like_a_launcher_s_and_all_come_back() -> None:
    argv = relay.wrap(Job(tuple(WORDS_OF_LAUNCHERS), (Host("a"),), 1), start=()).argv
    words = argv[argv.index("--") + 1 :]
    assert not [word for word in words if word.startswith(("-", ":", "@"))]
    assert [relay.unguarded(word) for word in words] == WORDS_OF_LAUNCHERS


def test_the_rank_is_started_in_the_folder_that_the_relay_is_told_of(tmp_path: Path) -> None:
    code, events = sh("pwd; echo $PWD", more=("--chdir", str(tmp_path)))
    assert (code, lines(events)) == (0, [("out", str(tmp_path))] * 2)
    code, events = sh("pwd", more=("--chdir", f"{tmp_path}/no"))
    assert (code, lines(events)) == (2, [])
    assert ended(events)["error"] == f"cannot enter the folder {tmp_path}/no: No such file or directory"


def test_a_rank_that_somebody_stops_is_told_of_and_also_that_it_goes_on(tmp_path: Path) -> None:
    running = popen("/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60")
    pid = int(wait_for(tmp_path / "pid"))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    running.terminate()
    _, events = finish(running)
    assert [event.info for event in events if isinstance(event, frames.Report)] == [{"suspended": True}, {"suspended": False}]


def test_words_of_a_rank_that_lives_are_passed_on_at_once_and_are_not_its_last_ones() -> None:
    said = words_line({frames.RUNNING: True, "stall": {"phase": "x"}}).encode().hex()
    script = f"import sys; sys.stderr.buffer.write(bytes.fromhex('{said}')); sys.exit(3)"
    code, events = finish(popen(sys.executable, "-c", script))
    assert code == 3
    (report,) = (event for event in events if isinstance(event, frames.Report))
    assert report.info["stall"] == {"phase": "x"}
    assert ended(events)["error"] == "exit code 3"
    assert "stall" not in ended(events)


def test_a_signal_of_the_users_goes_to_the_rank_and_not_to_what_it_has_started(tmp_path: Path) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('heard', child.poll(), flush=True), sys.exit(0)))\n"
        f"open('{tmp_path}/pid', 'w').write(str(os.getpid()) + chr(10))\n"
        "time.sleep(60)\n"
    )
    running = popen(sys.executable, "-c", script)
    wait_for(tmp_path / "pid")
    running.send_signal(signal.SIGUSR1)
    code, events = finish(running)
    assert code == 0
    assert lines(events) == [("out", "heard None")]


def test_signals_that_come_as_the_rank_ends_do_not_end_its_keeper() -> None:
    script = (
        "import os, signal, sys\n"
        "from hvdtrain.launch import keeper\n"
        "def work(ready):\n"
        "    ready()\n"
        "    os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    return 0\n"
        "sys.exit(keeper.keep(work, lambda *_: None, grace_s=1.0))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 10
    while time.monotonic() < until and (not linux.is_stopped(running.pid) or linux.descendants(running.pid)):
        time.sleep(0.01)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        running.send_signal(number)
    assert running.wait(timeout=10) == 0


def test_a_rank_that_takes_more_memory_than_its_control_group_has_is_said_to_have_run_out_of_memory(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/hvdtrain-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("60M")
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'x = bytearray(200 << 20); print(len(x))'"
    try:
        code, events = sh(enter)
    finally:
        group.rmdir()
    assert code == 137
    assert ended(events)["error"].startswith("killed by signal 9 (SIGKILL): out of memory")


def test_a_rank_that_stops_in_order_when_it_is_told_to_is_heard(tmp_path: Path) -> None:
    said = words_line({"stopped": True, "error": "saved"}).encode().hex()
    script = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (sys.stderr.buffer.write(bytes.fromhex('{said}')), sys.exit(75)))\n"
        f"open('{tmp_path}/ready', 'w').write(chr(10))\n"
        "time.sleep(60)\n"
    )
    running = popen(sys.executable, "-c", script, more=("--grace", "5"))
    wait_for(tmp_path / "ready")
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGTERM)  # one request: Slurm's reaches each process of a step
    code, events = finish(running)
    assert code == 75
    assert (ended(events)["error"], ended(events)["told"]) == ("saved", 0)
