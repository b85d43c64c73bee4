"""What becomes of a training when something goes wrong: when it is noticed, what is said, what is lost, what is left behind.

The table that this prints stands in docs/faults.md. Faults of hosts and cables are in tests/launch/test_cluster.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.harness import LAUNCHERS, ROOT, hvdtrain

pytestmark = pytest.mark.ranks

RANKS, STEPS, SAVE_EVERY = 3, 60, 5
RECIPE = f"{ROOT}/tests/support/faults.py:long"
FRAMEWORKS = {"mpirun": "numpy", "horovodrun-gloo": "torch"}
#: how long a rank may stand still in these tests
STALL_S = 5


class Job:
    """A training that runs, and what it has left in ``folder``."""

    def __init__(self, folder: Path, launcher: str, fault: str = "", *more: str) -> None:
        self.folder = folder
        self.words = ["run", "-np", str(RANKS), "-H", f"localhost:{RANKS}", *LAUNCHERS[launcher], *more, RECIPE]
        self.words += ["--set", f"framework={FRAMEWORKS[launcher]}", "--set", f"out={folder}/out", "--run-dir", "run"]
        self.words += ["--save-every", str(SAVE_EVERY), "--keep", "2", "--stall-timeout", str(STALL_S)]
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain", *self.words, *(["--set", f"fault={fault}"] if fault else [])],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def steps(self) -> list[int]:
        """The steps that the primary has done, in order, those done again too."""
        path = self.folder / "out/steps"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 90
        while step not in self.steps():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"out/pid-{rank}").read_text())

    def finish(self, within_s: float) -> tuple[int, str]:
        text, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, text

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        with self.process:  # closes its pipes, and waits
            self.process.kill()

    def orphans(self, within_s: float = 10.0) -> list[str]:
        """Processes of this job that are still there after this time."""
        deadline = time.monotonic() + within_s
        while True:
            left = [line for line in command_lines() if str(self.folder) in line]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def go_on(self) -> list[int]:
        """Give the same command again, and the steps done in both together."""
        done = hvdtrain(*self.words, cwd=self.folder, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.steps()


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            yield line


@dataclass(frozen=True)
class Fault:
    """What happens, after which step; how soon the job must end, with which codes, and what must be said."""

    within_s: float
    codes: tuple[int, ...]
    says: tuple[str, ...]
    do: Callable[[Job], None] | None = None
    recipe: str = ""


LAST = RANKS - 1
MOVES = 2 * STALL_S + 15  # the watchdog's limit, its last words, the launcher's and our patience on a busy machine


def kill_rank(rank: int, number: int) -> Callable[[Job], None]:
    return lambda job: os.kill(job.pid(rank), number)


FAULTS = {
    "kill -9 a worker": Fault(15, (137,), (f"rank {LAST} on ", "killed by signal 9"), kill_rank(LAST, signal.SIGKILL)),
    "kill -9 the primary": Fault(15, (137,), ("rank 0 on ", "killed by signal 9"), kill_rank(0, signal.SIGKILL)),
    "kill -9 the launcher": Fault(15, (-9,), (), lambda job: job.process.kill()),
    "SIGSTOP a worker": Fault(
        MOVES + 10, (124,), ("no progress for", f"rank {LAST} on ", "is stopped (SIGSTOP"), kill_rank(LAST, signal.SIGSTOP)
    ),
    "a rank skips a collective": Fault(
        MOVES, (124,), ("no progress for", "ranks 0 and 1 wait in ", f"rank {LAST} on ", "faults.py:"), recipe="skip"
    ),
    "endless loop in data loading": Fault(
        MOVES, (124,), ("ranks 0 and 1 wait in ", f"rank {LAST} on ", "is in data loading (step ", "faults.py:", " in take"),
        recipe="loop",
    ),
    "exception in data loading": Fault(
        15, (1,), (f"rank {LAST} on ", "OSError: a bad disk", "in the batch of samples "), recipe="loader"
    ),
    "exception in a callback": Fault(15, (1,), (f"rank {LAST} on ", "KeyError: 'mine'", "step 12"), recipe="callback"),
    "exception if rank == 0": Fault(15, (1,), ("rank 0 on ", "KeyError: 'mine'", "step 12"), recipe="primary"),
}  # fmt: skip

#: The same code in Python ends the job there, whatever the launcher.
CASES = [(name, "mpirun") for name in FAULTS] + [(name, "horovodrun-gloo") for name in FAULTS if "exception" not in name]

ROWS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Print what was measured, in one table."""
    yield
    print("\n" + "\n".join([HEAD, *ROWS]))


HEAD = f"{'fault':30} {'launcher':16} {'noticed':>8} {'code':>5} {'lost':>5} {'again':>6} {'left':>5}  what it says"


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_a_fault_is_named_ends_the_job_and_loses_no_sample(tmp_path, monkeypatch, name, launcher):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fault = FAULTS[name]
    with Job(tmp_path, launcher, fault.recipe) as job:
        job.wait_for_step(12)
        started = time.monotonic()
        if fault.do is not None:
            fault.do(job)
        code, text = job.finish(fault.within_s + 30)
    seconds = time.monotonic() - started
    left = job.orphans()
    last = f"\n{text}".rpartition("\nError: ")[2]
    steps = job.go_on()
    lost, again = STEPS - len(set(steps)), len(steps) - len(set(steps))
    says = (
        " / ".join(line for line in last.splitlines() if line and not line.startswith((" ", "Hint")))[:160]
        if "Error: " in text
        else ""
    )
    ROWS.append(f"{name:30} {launcher:16} {seconds:>6.1f} s {code:>5} {lost * 20:>5} {again * 20:>6} {len(left):>5}  {says}")
    print(ROWS[-1])
    assert seconds < fault.within_s, text
    assert code in fault.codes, text
    assert all(part in last for part in fault.says), text
    assert not left
    assert steps[-1] == STEPS
    assert lost == 0
    assert again <= SAVE_EVERY + 2, steps  # what came after the last checkpoint, or while it was still being written


@pytest.mark.parametrize(
    ("launcher", "number"), [("mpirun", signal.SIGTERM), ("mpirun", signal.SIGUSR1), ("horovodrun-gloo", signal.SIGTERM)]
)
def test_a_run_that_is_asked_to_stop_saves_on_all_ranks_at_one_step_and_says_so_to_the_scheduler(
    tmp_path, monkeypatch, launcher, number
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Job(tmp_path, launcher, "", "--stop-timeout", "20") as job:
        job.wait_for_step(12)
        job.process.send_signal(number)
        code, text = job.finish(30)
    assert code == 75, text
    last = job.steps()[-1]
    assert f"stopped in order (on request) at step {last}; the checkpoint of step {last} is saved" in text
    assert not job.orphans()
    assert (tmp_path / f"run/checkpoints/step-{last:08}").is_dir()
    assert job.go_on() == list(range(1, STEPS + 1))  # nothing lost, nothing again


def test_a_run_that_does_not_stop_in_order_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Job(tmp_path, "mpirun", "loop", "--stop-timeout", "2") as job:
        job.wait_for_step(12)
        time.sleep(1)  # now the last rank loads without end
        job.process.send_signal(signal.SIGTERM)
        code, text = job.finish(30)
    assert code == 143, text
    assert "the job was ended by a signal (SIGTERM)" in text
    assert not job.orphans()


def test_a_time_limit_stops_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["run", "-np", "2", "-H", "localhost:2", *LAUNCHERS["mpirun"], RECIPE, "--set", "out=out", "--set", "seconds=0.2"]
    done = hvdtrain(*words, "--max-time", "2s", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "stopped in order (--max-time 2 s is over) at step " in done.stderr


def test_a_job_that_lost_a_rank_starts_again_from_its_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Job(tmp_path, "mpirun", "", "--max-restarts", "1") as job:
        job.wait_for_step(12)
        os.kill(job.pid(LAST), signal.SIGKILL)
        code, text = job.finish(60)
    assert code == 0, text
    assert "restart 1 of 1: 3 ranks on localhost:3" in text
    steps = job.steps()
    assert steps[-1] == STEPS
    assert set(steps) == set(range(1, STEPS + 1))
    assert len(steps) - STEPS <= SAVE_EVERY + 2


def test_a_mistake_of_the_users_is_not_tried_again_and_a_failure_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["run", "-np", "2", "-H", "localhost:2", *LAUNCHERS["mpirun"], "--max-restarts", "1"]
    done = hvdtrain(*words, RECIPE, "--set", "no=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "restart" not in done.stderr
    done = hvdtrain(*words, "--", "sh", "-c", "exit 3", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("restart 1 of 1") == 1
