"""On two emulated hosts: users' own scripts, and hosts with unequal shares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactness.table import FLOAT32
from tests.support.harness import RECIPES, difference, train, weights
from tests.support.hosts import ROOT, Cluster, emulated

pytestmark = pytest.mark.ranks

RUN = [sys.executable, "-m", "hvdtrain", "run", "-np", "4", "-H", "node1:2,node2:2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with emulated(2) as hosts:
        yield hosts


def accuracy(text: str) -> float:
    found = re.findall(r"accuracy:? ([\d.]+)", text)
    assert found, text
    return float(found[-1])


@pytest.mark.parametrize("script", ["torch_loop", "keras_fit"])
def test_a_script_of_one_process_trains_on_two_hosts_to_the_same_figures(cluster: Cluster, tmp_path: Path, script: str) -> None:
    program = ROOT / "examples" / f"{script}.py"
    single = cluster.run("node1", sys.executable, program, cwd=tmp_path)
    job = cluster.run("node1", *RUN, "--", sys.executable, program, cwd=tmp_path)
    assert single.returncode == job.returncode == 0, single.stdout + single.stderr + job.stdout + job.stderr
    print(f"{script}: accuracy {accuracy(single.stdout)} alone, {accuracy(job.stdout)} on 4 ranks of 2 hosts")
    assert accuracy(job.stdout) == accuracy(single.stdout)
    assert not cluster.left(5)


@pytest.mark.parametrize(
    ("framework", "exchange"), [("torch", "auto"), ("torch", "shared"), ("keras", "auto"), ("keras", "shared")]
)
def test_hosts_with_unequal_shares_train_to_the_weights_of_one_process(
    cluster: Cluster, tmp_path: Path, framework: str, exchange: str
) -> None:
    single = train(framework, 1, "", tmp_path / "single", "--max-steps", "20")
    words = [f"{RECIPES}:{framework}", "--set", f"out={tmp_path}/job", "--max-steps", "20", "--share", "node1=2,node2=1"]
    words += ["--exchange", exchange]
    job = cluster.run("node1", *RUN, *words, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    worst = difference(weights(tmp_path / "job", 3), weights(single))
    print(f"{framework}, {exchange}: node1=2,node2=1 on 4 ranks, largest relative difference {worst:.1e}")
    assert worst <= FLOAT32
