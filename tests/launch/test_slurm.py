"""srun for real: a small Slurm on two emulated hosts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.harness import ROOT
from tests.support.slurm import slurm

pytestmark = pytest.mark.ranks

Salloc = Callable[..., "subprocess.CompletedProcess[str]"]
RUN = [sys.executable, "-m", "hvdtrain", "run"]
MEET = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(c.rank + 1), c.size)"


@pytest.fixture(scope="module")
def salloc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Salloc]:
    """Run a command inside a new allocation."""
    with slurm(tmp_path_factory.mktemp("slurm")) as (cluster, conf):
        yield lambda *words, cwd: cluster.run("node1", "env", f"SLURM_CONF={conf}", "salloc", *words, cwd=cwd, timeout=120)


SHAPES = {
    ("-N2", "-n4", "--ntasks-per-node=2"): ["[0 node1] 10 4", "[1 node1] 10 4", "[2 node2] 10 4", "[3 node2] 10 4"],
    ("-N1", "-n2", "-wnode1"): ["[0 node1] 3 2", "[1 node1] 3 2"],  # on this machine, which Slurm does not know as localhost
    ("-N2", "-n3"): ["[0 node1] 6 3", "[1 node1] 6 3", "[2 node2] 6 3"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_inside_an_allocation_srun_starts_the_ranks_where_slurm_put_them(
    salloc: Salloc, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    """Unequal numbers of tasks too; and the ranks meet over MPI."""
    done = salloc(*shape, *RUN, "--", sys.executable, "-c", MEET, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launcher: srun (inside a Slurm job, with pmix)" in done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("[")) == SHAPES[shape]


def test_a_step_inside_a_step_does_not_wait_for_it(salloc: Salloc, tmp_path: Path) -> None:
    """As from a shell that ``srun --pty`` gave."""
    words = ["-N2", "-n4", "--ntasks-per-node=2", "srun", "-N1", "-n1", *RUN, "--", "hostname"]
    done = salloc(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = ["[0 node1] node1", "[1 node1] node1", "[2 node2] node2", "[3 node2] node2"]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("[")) == hosts


def test_a_failed_task_ends_the_step_with_its_code(salloc: Salloc, tmp_path: Path) -> None:
    started = time.monotonic()
    words = [
        "-N2",
        "-n2",
        "--ntasks-per-node=1",
        *RUN,
        "--",
        "sh",
        "-c",
        "[ $SLURM_PROCID = 1 ] && exit 7; sleep 100",
    ]
    done = salloc(*words, cwd=tmp_path)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "Error: rank 1 on node2 failed first: exit code 7" in done.stderr
    assert time.monotonic() - started < 30


def test_variables_reach_the_tasks_by_name(salloc: Salloc, tmp_path: Path) -> None:
    script = 'printf "%s|%s\\n" "$A" "$PYTHONPATH"'
    words = ["-N2", "-n2", "env", "PYTHONPATH=/some where", *RUN, "--env", "A=b, c='d' $e", "--", "sh", "-c", script]
    done = salloc(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] b, c='d' $e|/some where\n") == 2, done.stdout


@pytest.mark.parametrize("signal", ["TERM", "USR1"])
def test_slurms_own_signals_stop_a_recipe_in_order(salloc: Salloc, tmp_path: Path, signal: str) -> None:
    """As when it takes the nodes away for another job (TERM), or as ``#SBATCH --signal=USR1@60`` asks it to."""
    recipe = f"{ROOT}/tests/support/faults.py:long --set out={tmp_path}/out --set seconds=0.2 --run-dir {tmp_path}/run"
    run = f"{' '.join(RUN)} --env PYTHONPATH={ROOT} {recipe} --save-every 1000"
    wait = f"until grep -qx 3 {tmp_path}/out/steps; do sleep 0.1; done"
    script = f"({wait}; scancel --signal={signal} $SLURM_JOB_ID) & {run}; code=$?; wait; exit $code"
    done = salloc("-N2", "-n2", "--ntasks-per-node=1", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 75, done.stdout + done.stderr
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) < 30
    assert f"the checkpoint of step {int(saved.name.removeprefix('step-'))} is saved" in done.stderr
