"""Real jobs on several emulated hosts: training, and everything that can go wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import RECIPES, weights
from tests.support.hosts import ROOT, STATE, Cluster, emulated
from tests.support.mpis import OTHERS, python_with

pytestmark = pytest.mark.ranks

LAUNCHERS = {
    "mpirun": ["--launcher", "mpirun"],
    "horovodrun-mpi": ["--launcher", "horovodrun"],
    "horovodrun-gloo": ["--launcher", "horovodrun", "--gloo"],
}
RUN = [sys.executable, "-m", "hvdtrain", "run"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with emulated(2) as hosts:
        yield hosts


#: Each launcher with each framework, each with equal and with unequal slots; not all of their products, as each takes 15 s.
TRAININGS = [
    (launcher, hosts, framework)
    for number, launcher in enumerate(LAUNCHERS)
    for hosts, framework in (
        ("node1:2,node2:2", "torch" if number % 2 else "keras"),
        ("node1:3,node2:1", "keras" if number % 2 else "torch"),
    )
]


@pytest.mark.parametrize(("launcher", "hosts", "framework"), TRAININGS)
def test_a_recipe_trains_on_two_hosts_to_the_same_weights_on_all_ranks(
    cluster: Cluster, tmp_path: Path, launcher: str, hosts: str, framework: str
) -> None:
    started = time.monotonic()
    words = ["-np", "4", "-H", hosts, *LAUNCHERS[launcher], f"{RECIPES}:{framework}", "--set", f"out={tmp_path}/out"]
    done = cluster.run("node1", *RUN, *words, "--max-steps", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(1, 4):
        for mine, primary in zip(weights(tmp_path / "out", rank), weights(tmp_path / "out"), strict=True):
            assert np.array_equal(mine, primary), f"rank {rank} differs from rank 0"
    assert "[0 node1] " in done.stdout
    assert not cluster.left(5)
    print(f"{launcher:16} {hosts:16} {framework:6} same weights on 4 ranks, {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize("mpi", OTHERS)
@pytest.mark.parametrize("hosts", ["node1:1,node2:1", "node1:2,node2:1"])
def test_the_ranks_of_every_mpi_meet_across_hosts(cluster: Cluster, tmp_path: Path, mpi: str, hosts: str) -> None:
    python = python_with(mpi)
    program = (
        "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(1), MPI.Get_processor_name(), MPI.Get_library_version())"
    )
    words = [python, "-m", "hvdtrain", "run", "-H", hosts, "--", python, "-c", program]
    done = cluster.run("node1", *words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    size = 2 if hosts == "node1:1,node2:1" else 3
    said = [line for line in done.stdout.splitlines() if f"] {size} node" in line]
    assert len(said) == size, done.stdout + done.stderr
    assert all(line.split()[1].strip("]") == line.split()[3] and OTHERS[mpi][1] in line for line in said), said
    assert not cluster.left(5)


def test_a_folder_whose_name_is_a_command_is_entered_and_not_run(cluster: Cluster, tmp_path: Path) -> None:
    """Horovod writes the folder's name into the command of a remote shell."""
    folder = tmp_path / "my $(touch PWN) dir;touch PWN;'x"
    folder.mkdir()
    done = cluster.run(
        "node1", *RUN, "-H", "node1:1,node2:1", "--gloo", "--nic", "eth0", "--", "sh", "-c", "pwd; echo $PWD", cwd=folder
    )
    assert sorted(done.stdout.splitlines()) == [f"[{n} node{n + 1}] {folder}" for n in (0, 0, 1, 1)], done.stdout + done.stderr
    assert not [path for path in (Path.home(), Path("/"), tmp_path, folder) if (path / "PWN").exists()]


#: Ranks that reduce in a loop; with MPI through mpi4py, with Gloo through Horovod.
LOOP = """
import os, time
if os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
    import torch, horovod.torch as hvd
    hvd.init()
    reduce = lambda: hvd.allreduce(torch.ones(1))
else:
    from mpi4py import MPI
    reduce = lambda: MPI.COMM_WORLD.allreduce(1)
step = 0
while True:
    reduce()
    step += 1
    if step < 4 or step % 20 == 0:
        print(f"step {step}\\n", end="", flush=True)
    time.sleep(0.05)
"""


def loop(tmp_path: Path, *words: str, python: str = sys.executable) -> list[str]:
    """Four ranks on two hosts that reduce in a loop."""
    (tmp_path / "loop.py").write_text(LOOP)
    return [python, *RUN[1:], "-H", "node1:2,node2:2", *words, "--", python, str(tmp_path / "loop.py")]


ALL_REDUCE = tuple(f"[{rank} node{1 + rank // 2}] step 3" for rank in range(4))


class Running:
    """A job on the cluster and what it has printed."""

    def __init__(self, cluster: Cluster, tmp_path: Path, argv: list[str]) -> None:
        self.cluster = cluster
        self.process = cluster.popen("node1", *argv, cwd=tmp_path)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    def wait_for(self, *said: str) -> None:
        deadline = time.monotonic() + 120
        while not all(each in self.text for each in said):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def finish(self, timeout: float) -> int | None:
        """The exit code, or None if it has not ended by then."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(10)
        return code

    def close(self) -> None:
        """Not for ending the job politely, but for leaving nothing to the next test."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()

    def pid(self, node: str, what: str) -> int:
        """The process on a host whose command line contains ``what`` and is not one of our own helpers."""
        found = [pid for pid, line in self.cluster.processes(node).items() if what in line and "start.py" not in line]
        return max(found)

    def launcher(self) -> int:
        """``hvdtrain run`` itself."""
        found = [
            pid for pid, line in self.cluster.processes("node1").items() if "-m hvdtrain run" in line and "setpriv" not in line
        ]
        return min(found)


def kill_worker(job: Running) -> None:
    os.kill(job.pid("node2", "loop.py"), signal.SIGKILL)


def kill_launcher(job: Running) -> None:
    os.kill(job.launcher(), signal.SIGKILL)


def interrupt(job: Running) -> None:
    os.kill(job.launcher(), signal.SIGINT)


def pull_cable(job: Running) -> None:
    job.cluster("partition", "node2")


def power_off(job: Running) -> None:
    job.cluster("poweroff", "node2")


@dataclass(frozen=True)
class Fault:
    """What happens to a running job, how long its end may take, and what must then be said."""

    do: Callable[[Running], None]
    within_s: float
    codes: tuple[int, ...]
    says: str


FAULTS = {
    "kill -9 a worker": Fault(kill_worker, 15, (137,), "killed by signal 9"),
    "kill -9 the launcher": Fault(kill_launcher, 15, (137, -9), ""),
    "Ctrl-C": Fault(interrupt, 10, (130,), "the job was ended by a signal"),
    # Open MPI's daemons ask each other (12 s), our ssh asks the host (20 s); nobody waits for Gloo's 30 s or TCP's hours.
    "cable pulled": Fault(pull_cable, 30, (), "node2"),
    "power cut": Fault(power_off, 30, (), "node2"),
}

ROWS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Print what was measured, in one table."""
    yield
    if ROWS:
        print(
            "\n"
            + "\n".join(
                [
                    f"{'fault':24} {'launcher':16} {'ends after':>10} {'clean at':>10} {'code':>5} {'left':>5}  what it says",
                    *ROWS,
                ]
            )
        )


def last_words(text: str) -> str:
    """What ``hvdtrain run`` itself says at the end."""
    return f"\n{text}".rpartition("\nError: ")[2] if "\nError: " in f"\n{text}" else ""


def note(fault: str, launcher: str, seconds: float, clean: float, code: int | None, left: list[str], text: str) -> None:
    said = [line for line in last_words(text).splitlines() if line.strip() and not line.startswith(("    ", "Hint"))]
    says = " / ".join(line if len(line) < 90 else f"{line[:87]}..." for line in (said[:1] + said[1:][-1:]))
    ROWS.append(f"{fault:24} {launcher:16} {seconds:>8.1f} s {clean:>8.1f} s {code!s:>5} {len(left):>5}  {says}")
    print(ROWS[-1])


#: Once it runs, horovodrun over MPI is mpirun; what differs is how it is ended.
CASES = [(name, launcher) for name in FAULTS for launcher in LAUNCHERS if launcher != "horovodrun-mpi" or "kill" in name]


@pytest.mark.parametrize(("name", "launcher"), [*CASES, ("power cut", "mpich")])
def test_a_fault_ends_the_job_everywhere_with_a_clear_message(
    cluster: Cluster, tmp_path: Path, name: str, launcher: str
) -> None:
    fault = FAULTS[name]
    cluster.fresh()
    python = python_with(launcher) if launcher in OTHERS else sys.executable
    with closing(Running(cluster, tmp_path, loop(tmp_path, *LAUNCHERS.get(launcher, []), python=python))) as job:
        job.wait_for(*ALL_REDUCE)
        started = time.monotonic()
        fault.do(job)
        code = job.finish(fault.within_s)
        seconds = time.monotonic() - started
        left = cluster.left(15)
        clean = time.monotonic() - started
    note(name, launcher, seconds, clean, code, left, job.text)
    assert code is not None, f"still running after {fault.within_s} s\n{job.text}"
    assert code in fault.codes if fault.codes else code not in (0, None), job.text
    assert fault.says in last_words(job.text) if fault.says else True, job.text
    assert not left


def test_an_elastic_job_goes_on_without_the_rank_that_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """Also in a folder with a blank in its name, where its script reads a file."""
    cluster.fresh()
    tmp_path = tmp_path / "a folder"
    tmp_path.mkdir()
    (tmp_path / "discover.sh").write_text("#!/bin/sh\ncat hosts\n")
    (tmp_path / "hosts").write_text("node1:2\nnode2:1\n")
    (tmp_path / "discover.sh").chmod(0o755)
    words = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", "./discover.sh", "--nic", "eth0"]
    program = [sys.executable, str(ROOT / "examples" / "torch_elastic.py"), "--steps", "1000"]
    argv = [*RUN, *words, "--env", "HOROVOD_GLOO_TIMEOUT_SECONDS=5", "--", *program]
    with closing(Running(cluster, tmp_path, argv)) as job:
        job.wait_for("step 500: loss")
        assert ": 2 ranks" not in job.text
        started = time.monotonic()
        os.kill(job.pid("node2", "torch_elastic.py"), signal.SIGKILL)
        job.wait_for(": 2 ranks")
        seconds = time.monotonic() - started
        code = job.finish(60)
    note("kill -9 a worker", "elastic", seconds, seconds, code, [], "")
    assert code == 0, job.text
    assert "step 0: 3 ranks" in job.text
    assert re.search(r"step 1000: loss \S+ on 2 ranks", job.text), job.text
    assert not cluster.left(5)


def trained(tmp_path: Path, *words: str) -> list[str]:
    """A recipe of 60 steps on two hosts; ``tmp_path/out/steps`` holds those that are done."""
    recipe = [
        f"{ROOT}/tests/support/faults.py:long",
        "--set",
        f"out={tmp_path}/out",
        "--set",
        "seconds=0.1",
        "--run-dir",
        "run",
    ]
    hosts = ["-H", "node1:1,node2:1", "--launcher", "mpirun", "--env", f"PYTHONPATH={ROOT}"]
    return [*RUN, *hosts, *words, *recipe, "--save-every", "5"]


def steps(tmp_path: Path) -> list[int]:
    path = tmp_path / "out" / "steps"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(job: Running, tmp_path: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while step not in steps(tmp_path):
        assert job.process.poll() is None, job.text
        assert time.monotonic() < deadline, job.text
        time.sleep(0.05)


def test_a_recipe_goes_on_with_the_hosts_that_are_left_when_one_loses_its_power(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fresh()
    with closing(Running(cluster, tmp_path, trained(tmp_path, "--max-restarts", "1"))) as job:
        wait_for_step(job, tmp_path, 12)
        started = time.monotonic()
        power_off(job)
        job.wait_for("restart 1 of 1")
        seconds = time.monotonic() - started
        code = job.finish(90)
    again = len(steps(tmp_path)) - 60
    note("power cut, --max-restarts", "mpirun", seconds, seconds, code, [], f"Error: {again} of 60 steps done again")
    assert code == 0, job.text
    assert "node2 is left out: no answer on port 22" in job.text
    assert "restart 1 of 1: 1 rank on node1:1" in job.text
    assert set(steps(tmp_path)) == set(range(1, 61))
    assert again <= 7
    assert not cluster.left(5)


def test_a_cable_that_is_out_for_five_seconds_costs_nothing_but_time(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fresh()
    with closing(Running(cluster, tmp_path, trained(tmp_path))) as job:
        wait_for_step(job, tmp_path, 12)
        pull_cable(job)
        time.sleep(5)
        cluster("heal", "node2")
        code = job.finish(60)
    note("cable out for 5 s", "mpirun", 5, 5, code, [], f"Error: {len(steps(tmp_path)) - 60} of 60 steps done again")
    assert code == 0, job.text
    assert steps(tmp_path) == list(range(1, 61))
    assert not cluster.left(5)


def refuse_ssh(cluster: Cluster) -> None:
    os.kill(int((STATE / "node2" / "sshd.pid").read_text()) and pid_of_sshd(cluster), signal.SIGKILL)


def pid_of_sshd(cluster: Cluster) -> int:
    """As seen from here: the pid file holds the number inside the host."""
    name = f"net:[{os.stat('/run/netns/node2').st_ino}]"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "net") == name and b"sshd" in (folder / "cmdline").read_bytes().split(b"\0")[0]:
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError("node2 has no sshd")


def hide_package(cluster: Cluster) -> None:
    cluster.run("node2", "mount", "-t", "tmpfs", "tmpfs", ROOT / "hvdtrain" / "launch", cwd=ROOT)


def nothing(cluster: Cluster) -> None:
    """The host is simply not there."""


START_FAULTS = {
    "sshd refuses": (refuse_ssh, "node1:1,node2:1", "node2: nothing listens on port 22"),
    "unknown host": (nothing, "node1:1,node7:1", "node7: unknown host: the name does not resolve"),
    "host without the package": (
        hide_package,
        "node1:1,node2:1",
        "node2: hvdtrain is not installed there at the path it has here",
    ),
    "power cut before": (lambda cluster: cluster("poweroff", "node2"), "node1:1,node2:1", "node2: no answer on port 22"),
}


@pytest.mark.parametrize("name", START_FAULTS)
def test_a_host_that_cannot_take_part_is_named_before_anything_starts(cluster: Cluster, tmp_path: Path, name: str) -> None:
    break_it, hosts, message = START_FAULTS[name]
    cluster.fresh()
    break_it(cluster)
    started = time.monotonic()
    done = cluster.run("node1", *RUN, "-H", hosts, "--", "hostname", cwd=tmp_path, timeout=60)
    seconds = time.monotonic() - started
    left = cluster.left(5)
    clean = time.monotonic() - started
    note(name, "any", seconds, clean, done.returncode, left, done.stderr)
    assert message in done.stderr
    assert "\nHint: " in done.stderr
    assert (done.returncode, done.stdout, left) == (1, "", [])
    assert seconds < 20


def test_hosts_check_connect_tells_what_each_host_is(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fresh()
    words = [sys.executable, "-m", "hvdtrain", "hosts", "check", "--connect", "-H", "node1:2,node2:2,node9:1"]
    done = cluster.run("node1", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "node1: Python " in done.stdout
    assert "eth0 10.99.0.2/24" in done.stdout
    assert "node9: unknown host: the name does not resolve" in done.stdout
    assert "1 mistake\n" in done.stdout


def test_the_interface_is_the_one_that_the_hosts_share(cluster: Cluster, tmp_path: Path) -> None:
    """Bridges with the same address on each host, as Docker makes them, are not taken."""
    cluster.fresh()
    for node in cluster.nodes():
        cluster.run(
            node, "sh", "-c", "ip link add docker0 up type bridge && ip addr add 172.17.0.1/16 dev docker0", cwd=tmp_path
        )
    words = [*RUN, "-H", "node1:1,node2:1", "--launcher", "mpirun"]
    done = cluster.run(
        "node1", *words, "--", sys.executable, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "network: eth0, in the subnet 10.99.0.0/24 of all 2 hosts" in done.stderr
    assert "docker0: made by container software" in done.stderr
    assert done.stdout.count("] 2\n") == 2
    wrong = cluster.run("node1", *words, "--nic", "nosuch0", "--", "hostname", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "node1, node2 have no network interface 'nosuch0'" in wrong.stderr
    assert "eth0 (10.99.0.1/24" in wrong.stderr


def test_host_keys_are_checked_unless_the_user_says_otherwise(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fresh()
    (STATE / "known_hosts").write_text("")
    words = [*RUN, "-H", "node1:1,node2:1", "--launcher", "mpirun"]
    done = cluster.run("node1", *words, "--", "hostname", cwd=tmp_path)
    assert done.returncode == 1
    assert "node2: its host key is not known, or has changed" in done.stderr
    for launcher in ("mpirun", "horovodrun-mpi"):
        trusting = cluster.run(
            "node1", *words[:-2], *LAUNCHERS[launcher], "--no-host-key-check", "--", "hostname", cwd=tmp_path
        )
        assert trusting.returncode == 0, trusting.stdout + trusting.stderr
        assert "[1 node2] node2\n" in trusting.stdout
    # horovodrun would not check any key, and the question before the start is left out
    done = cluster.run("node1", *words[:-2], *LAUNCHERS["horovodrun-gloo"], "--no-probe", "--", "hostname", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Host key verification failed" in done.stdout + done.stderr
