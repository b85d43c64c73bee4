"""A rank that does not get on says where it stands."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.launch.stall import Stall
from hvdtrain.progress import Progress
from hvdtrain.watchdog import LOADER_THREAD, Watchdog, is_users, place, thread_stacks


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[Stall, bool]] = []
        self.final = threading.Event()

    def __call__(self, stall: Stall, final: bool) -> None:
        self.calls.append((stall, final))
        if final:
            self.final.set()


@pytest.fixture
def watch():
    dogs = []

    def start(progress, limit_s):
        heard = Heard()
        dogs.append(Watchdog(progress, limit_s, heard))
        dogs[-1].start()
        return heard

    yield start
    for dog in dogs:
        dog.close()


def test_it_speaks_early_and_then_at_the_limit(watch):
    progress = Progress("training step", 7)
    heard = watch(progress, 0.4)
    with progress.waits("allreduce of", lambda: ["a.weight", "b.weight", "c", "d", "e"]):
        assert heard.final.wait(5)
    (early, is_final), (late, _) = heard.calls[:2]
    assert not is_final
    assert early.text == late.text == "waits in allreduce of a.weight, b.weight, c and 2 more (step 7)"
    assert 0.15 <= early.seconds < late.seconds


def test_a_rank_that_gets_on_is_left_alone(watch):
    progress = Progress("training step", 0)
    heard = watch(progress, 0.4)
    for _ in range(20):
        time.sleep(0.05)
        progress.moved()
    assert heard.calls == []


def test_before_training_there_is_ten_times_as_much_time(watch):
    heard = watch(Progress("building the recipe", None), 0.1)
    assert not heard.final.wait(0.5)
    assert heard.final.wait(5)


def hang_in_user_code(until: threading.Event) -> None:
    until.wait()


def test_data_loading_is_looked_for_in_the_loaders_thread():
    done = threading.Event()
    thread = threading.Thread(target=hang_in_user_code, args=(done,), name=LOADER_THREAD, daemon=True)
    thread.start()
    try:
        stall = Watchdog(Progress("data loading", 12), 60, Heard()).look(61)
    finally:
        done.set()
        thread.join()
    assert stall.text.startswith("is in data loading (step 12): tests/test_watchdog.py:")
    assert stall.at.endswith("in hang_in_user_code")
    assert stall.stacks.startswith(f"{LOADER_THREAD}:\n")


def test_the_place_is_the_innermost_line_of_the_users_own_code():
    (stack,) = (stack for name, stack in thread_stacks_of_a_sleeper() if name == "sleeper")
    assert place(stack).endswith("in hang_in_user_code")  # and not in threading.py, where it waits
    assert "_bootstrap" not in str(stack)


def thread_stacks_of_a_sleeper():
    done = threading.Event()
    thread = threading.Thread(target=hang_in_user_code, args=(done,), name="sleeper", daemon=True)
    thread.start()
    time.sleep(0.05)
    stacks = thread_stacks()
    done.set()
    thread.join()
    return stacks.items()


def test_whose_code_it_is():
    import numpy

    import hvdtrain

    assert is_users(__file__)
    assert not any(map(is_users, (threading.__file__, numpy.__file__, hvdtrain.__file__, "<frozen runpy>")))
    assert place([]) == "no Python code"


def test_native_code_that_keeps_pythons_lock_is_found_out_too(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import re, time\n"
        "from hvdtrain import watchdog\n"
        "from hvdtrain.progress import Progress\n"
        "watchdog._NATIVE_S = 0.5\n"
        "watchdog.Watchdog(Progress('training step', 3), 1.0, lambda stall, final: None).start()\n"
        "time.sleep(0.4)\n"
        "re.match(r'(a+)+$', 'a' * 40 + 'b')\n"
    )
    with subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True, cwd=Path.cwd()) as running:
        try:
            first, said = running.stderr.readline(), ""
            while "in <module>" not in said:  # the main thread's outermost frame is the last line
                said += running.stderr.readline()
        finally:
            running.kill()
    assert "Timeout (0:00:01" in first
    assert 'stuck.py", line 7 in <module>' in said


def test_a_folder_that_is_gone_does_not_end_the_watch(watch, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    heard = watch(Progress("training step", 7), 0.2)
    assert heard.final.wait(5)
    assert heard.calls[-1][0].phase == "training step"
