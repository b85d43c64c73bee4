"""Processes as the kernel sees them. With real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from hvdtrain.launch import linux

#: Adopts what its child leaves behind, and ends it.
ADOPTS = """
import os, subprocess, sys
from hvdtrain.launch import linux
linux.adopt_orphans()
subprocess.run(["/bin/sh", "-c", "setsid sleep 1000 & setsid sh -c 'sleep 1000 & exec sleep 1000' & sleep 0.2"])
print(len(linux.descendants(os.getpid())))
linux.kill_descendants()
print(len(linux.descendants(os.getpid())))
"""


def test_what_left_its_session_and_lost_its_parent_is_found_and_ended() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTS], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["3", "0"]


#: The first look sees nothing, as it may be while processes come and go.
BLIND = """
import subprocess
from hvdtrain.launch import linux
linux.adopt_orphans()
subprocess.Popen(["/bin/sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
looks, descendants = [], linux.descendants
linux.descendants = lambda pid: descendants(pid) if looks else looks.append(pid) or []
linux.kill_descendants()
print(len(looks), len(descendants(looks[0])))
"""


def test_one_look_that_sees_nothing_is_not_believed() -> None:
    done = subprocess.run([sys.executable, "-c", BLIND], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["1", "0"]


def test_what_another_thread_has_started_is_found() -> None:
    started: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["/bin/sleep", "1000"]))
        is_over.wait(20)  # once the thread is gone, its child is the main thread's

    thread = threading.Thread(target=start)
    thread.start()
    while not started:
        time.sleep(0.01)
    assert started[0].pid in linux.descendants(os.getpid())
    is_over.set()
    thread.join()
    started[0].kill()
    started[0].wait()


def test_a_child_that_has_ended_keeps_its_number_until_it_is_waited_for() -> None:
    child = subprocess.Popen(["/bin/sleep", "1000"])
    assert not linux.has_ended(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while not linux.has_ended(child.pid):
        assert time.monotonic() < deadline
    assert linux.has_ended(child.pid)
    assert not linux.is_alive(child.pid)
    os.kill(child.pid, 0)
    assert child.wait() == -signal.SIGKILL


def test_signals_wait_for_us_and_reach_a_child() -> None:
    with linux.signals_wait({signal.SIGUSR1}) as let_through:
        child = subprocess.Popen(["/bin/sleep", "1000"], preexec_fn=linux.dies_with_us(signal.SIGKILL, let_through))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # a test runner has other threads, which would take it
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
        child.send_signal(signal.SIGUSR1)
        assert child.wait(timeout=10) == -signal.SIGUSR1
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
