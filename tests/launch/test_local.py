"""The local launcher: processes on this machine that find each other over Gloo."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hvdtrain.launch import GRACE_S, Host, Job, start_argv
from hvdtrain.launch.local import Local, rank_environment
from hvdtrain.launch.rendezvous import serve
from hvdtrain.world import World

LOCAL = Local(start_argv(sys.executable))


def popen(np: int, script: str, grace_s: float = GRACE_S) -> subprocess.Popen[str]:
    job = Job(("/bin/sh", "-c", script), (Host("localhost", np),), np, controller="gloo", grace_s=grace_s)
    command = LOCAL.command(job)
    return subprocess.Popen(command.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_get_the_world_of_horovod() -> None:
    assert World.from_env(rank_environment(2, 3, 4711)) == World(2, 3, 2, 3, 0, 1, "horovod")


def test_every_rank_runs_and_the_job_ends_with_0() -> None:
    out, err = popen(3, "echo $HOROVOD_RANK of $HOROVOD_SIZE").communicate(timeout=30)
    assert sorted(out.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
    assert err == ""


@pytest.mark.parametrize(("program", "code"), [("/nope", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_be_started_has_a_shell_s_code(program: str, code: int) -> None:
    job = Job((program,), (Host("localhost", 2),), 2, controller="gloo")
    done = subprocess.run(LOCAL.command(job).argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.splitlines()[0].partition(":")[0]) == (code, f"cannot start {program}")


def test_rank_0_alone_reads_what_the_launcher_is_given() -> None:
    job = Job(("/bin/sh", "-c", "echo $HOROVOD_RANK $(cat)"), (Host("localhost", 2),), 2, controller="gloo")
    done = subprocess.run(LOCAL.command(job).argv, input="hi\n", capture_output=True, text=True, timeout=30, check=True)
    assert sorted(done.stdout.splitlines()) == ["0 hi", "1"]


@pytest.mark.parametrize(("how", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failed_rank_ends_the_others_and_gives_its_code(how: str, code: int) -> None:
    started = time.monotonic()
    running = popen(3, f"[ $HOROVOD_RANK = 1 ] && {{ {how}; }}; exec sleep 60")
    running.communicate(timeout=30)
    assert running.returncode == code
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_signal_ends_all_ranks(trap: str, tmp_path: Path) -> None:
    running = popen(2, f"{trap}touch {tmp_path}/$HOROVOD_RANK; while :; do sleep 0.1; done")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=10)
    assert running.returncode == (137 if trap else 143)


def test_a_signal_during_the_start_reaches_the_ranks_that_are_started_later_too(tmp_path: Path) -> None:
    """Ranks that end with 0 when they are told: none of them fails, which would end the others."""
    script = f"trap 'kill $!; exit 0' TERM; touch {tmp_path}/$HOROVOD_RANK; sleep 60 >&- 2>&- & wait"
    running = popen(40, script, grace_s=10)
    while not list(tmp_path.iterdir()):
        assert running.poll() is None
        time.sleep(0.001)
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=20)
    assert running.returncode in (0, 143)  # 143: one was told before it had its trap
    assert time.monotonic() - started < 8


def test_the_store_gives_back_what_was_put_and_says_404_before() -> None:
    with serve() as port:
        url = f"http://127.0.0.1:{port}/global/0"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, timeout=10)
        assert caught.value.code == 404
        caught.value.close()
        urllib.request.urlopen(urllib.request.Request(url, b"\x00\xff", method="PUT"), timeout=10).close()
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"\x00\xff"
