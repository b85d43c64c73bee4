"""Elastic jobs on emulated hosts: what is lost, when the others go on, and that nothing of it is seen in the weights."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hvdtrain.data.sampler import Sampler
from tests.launch.test_cluster import Running
from tests.support import elastic, recipes
from tests.support.harness import difference, hvdtrain
from tests.support.hosts import ROOT, Cluster, emulated

pytestmark = pytest.mark.ranks

RECIPE = ROOT / "tests" / "support" / "elastic.py"
ROWS: list[str] = []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with emulated(4) as hosts:
        yield hosts


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if ROWS:
        head = (
            f"{'fault':28} {'launcher':20} {'goes on after':>13} {'ranks':>7} {'code':>4} {'lost':>4} {'twice':>5} {'left':>4}"
        )
        print("\n" + "\n".join([f"{head}  what it says", *ROWS]))


class Elastic:
    """A job on hosts that a file names, and the faults that it has outlived."""

    def __init__(self, cluster: Cluster, folder: Path, framework: str, hosts: str, *cool_down: str) -> None:
        self.cluster, self.folder, self.framework, self.out = cluster, folder, framework, folder / "out"
        self.faults: list[tuple[str, float, str, str]] = []
        (folder / "discover.sh").write_text("#!/bin/sh\ncat hosts\n")
        (folder / "discover.sh").chmod(0o755)
        self.hosts(hosts)
        options = ["--min-np", "1", "--max-np", "4", "--host-discovery-script", "./discover.sh", "--nic", "eth0"]
        recipe = [str(RECIPE), "--set", f"framework={framework}", "--set", f"out={self.out}", "--set", "pause=0.1"]
        for word in ("--blacklist-cooldown-range", *cool_down) if cool_down else ():
            options.append(f"--launcher-arg={word}")
        start = [sys.executable, "-m", "hvdtrain", "run", "-np", "3", *options, "--env", f"PYTHONPATH={ROOT}"]
        self.job = Running(cluster, folder, [*start, *recipe, "--set", "epochs=1000", "--run-dir", "run"])

    def hosts(self, names: str) -> None:
        """The hosts of the moment, at once."""
        (self.folder / "new").write_text("".join(f"{name}:1\n" for name in names.split()))
        (self.folder / "new").rename(self.folder / "hosts")

    def begins(self) -> None:
        """Until a first epoch is over."""
        self.job.wait_for("step ")
        deadline = time.monotonic() + 60
        while max((int(str(line["step"])) for line in self.lines()), default=0) < 20:
            assert time.monotonic() < deadline, self.job.text
            time.sleep(0.1)

    def outlives(self, name: str, fault: Callable[[], object], says: str, ranks: str) -> None:
        """``says`` begins the line that tells of it, ``ranks`` are those before and after: 3>2."""
        before = len(self.job.text)
        at = time.time()
        fault()
        deadline = time.monotonic() + 90
        while (found := re.search(rf"{says}; .*\n", self.job.text[before:])) is None:
            assert self.job.process.poll() is None, self.job.text
            assert time.monotonic() < deadline, self.job.text
            time.sleep(0.1)
        size = int(ranks.rpartition(">")[2])
        while not (done := [line["time"] for line in self.lines() if line["time"] > at and line["size"] == size]):
            assert time.monotonic() < deadline, self.job.text
            time.sleep(0.1)
        self.faults.append((name, min(done) - at, ranks, found.group().strip()))

    def lines(self) -> list[dict[str, object]]:
        return [line for line in elastic.lines(self.out) if line["what"] == "end"]

    def ends_well(self) -> None:
        (self.out / "finish").touch()
        code = self.job.finish(60)
        left = self.cluster.left(10)
        steps = 1 + max(int(str(line["step"])) for line in self.lines())
        sampler = Sampler(recipes.SAMPLES, elastic.BATCH, seed=5)
        expected = [part.indices.tolist() for epoch in range(1 + steps // 16) for part in sampler.epoch(epoch)][:steps]
        lost, twice = elastic.lost_and_repeated(self.out, expected)
        for name, seconds, ranks, says in self.faults:
            launcher = f"elastic ({self.framework})"
            row = (
                f"{name:28} {launcher:20} {seconds:>11.1f} s {ranks:>7} {code!s:>4} {lost:>4} {twice:>5} {len(left):>4}  {says}"
            )
            ROWS.append(row)
            print(row)
        assert code == 0, self.job.text
        assert (lost, twice) == (0, 0)
        assert not left
        first, *others = elastic.final_weights(self.out)
        assert all(difference(other, first) == 0 for other in others)
        single = self.folder / "single"
        words = ["--set", f"framework={self.framework}", "--set", f"out={single}", "--set", "pause=0", "--set", "epochs=1000"]
        alone = hvdtrain("train", RECIPE, *words, "--max-steps", str(steps), cwd=self.folder, PYTHONPATH=str(ROOT))
        assert alone.returncode == 0, alone.stdout + alone.stderr
        largest = difference(first, elastic.final_weights(single)[0])
        print(f"{self.framework}: after {steps} steps the largest relative difference to a single process is {largest:.1e}")
        assert largest < 1e-5


def rank_of(job: Running, node: str) -> int:
    return job.pid(node, "hvdtrain train")


def test_a_rank_is_killed_a_host_joins_and_leaves(cluster: Cluster, tmp_path: Path) -> None:
    made = Elastic(cluster, tmp_path, "torch", "node1 node2 node3", "2", "4")
    with closing(made.job) as job:
        made.begins()
        worker = re.search(r"\[0 (node\d)\]", job.text)
        assert worker is not None
        node = next(name for name in ("node2", "node3") if name != worker.group(1))
        made.outlives(
            "kill -9 a worker", lambda: os.kill(rank_of(job, node), signal.SIGKILL), rf"rank \d on {node} is gone", "3>2"
        )
        made.outlives("its host has cooled down", lambda: None, rf"rank \d on {node} joined", "2>3")
        made.outlives("a host joins", lambda: made.hosts("node1 node2 node3 node4"), r"rank \d on node4 joined", "3>4")
        made.outlives("a host leaves the list", lambda: made.hosts("node1 node2 node3"), r"rank \d on node4 is gone", "4>3")
        made.ends_well()


def test_the_primary_is_killed_and_a_host_loses_its_power(cluster: Cluster, tmp_path: Path) -> None:
    made = Elastic(cluster, tmp_path, "keras", "node1 node2 node3")
    with closing(made.job) as job:
        made.begins()
        primary = re.search(r"\[0 (node\d)\]", job.text)
        assert primary is not None
        node = primary.group(1)
        made.outlives(
            "kill -9 the primary", lambda: os.kill(rank_of(job, node), signal.SIGKILL), rf"rank 0 on {node} is gone", "3>2"
        )
        other = next(name for name in ("node2", "node3") if name != node)
        made.outlives("power cut", lambda: cluster("poweroff", other), rf"rank \d on {other} is gone", "2>1")
        made.ends_well()
