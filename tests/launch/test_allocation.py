"""Hosts from a batch system."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host
from hvdtrain.launch.allocation import from_environment

ALLOCATIONS = {
    "slurm": (
        {"SLURM_JOB_NODELIST": "node[01-03],gpu1", "SLURM_TASKS_PER_NODE": "4(x3),2"},
        [("node01", 4), ("node02", 4), ("node03", 4), ("gpu1", 2)],
    ),
    "slurm in a step": (
        {
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS_PER_NODE": "4",
        },
        [("n1", 4), ("n2", 4)],
    ),
    "lsf pairs": ({"LSB_MCPU_HOSTS": "h1 3 h2 1"}, [("h1", 3), ("h2", 1)]),
    "lsf with a launch node": ({"LSB_MCPU_HOSTS": "batch1 1 h1 4 h2 4", "CSM_ALLOCATION_ID": "7"}, [("h1", 4), ("h2", 4)]),
    "lsf names": ({"LSB_HOSTS": "h1 h1 h1 h2"}, [("h1", 3), ("h2", 1)]),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_an_allocation_is_read(name: str) -> None:
    variables, expected = ALLOCATIONS[name]
    found = from_environment(variables)
    assert found is not None
    assert found.warnings == ()
    assert found.hosts == tuple(Host(host, slots) for host, slots in expected)


def test_outside_of_a_batch_system_there_is_none() -> None:
    assert from_environment({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_a_node_list_without_tasks_is_one_rank_a_node_and_says_so() -> None:
    found = from_environment({"SLURM_JOB_NODELIST": "n[1-2]"})
    assert found is not None
    assert sum(host.slots for host in found.hosts) == 2
    assert "SLURM_TASKS_PER_NODE" in found.warnings[0]


CONTRADICTIONS = {
    "counts differ": {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2)"},
    "no count": {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "four"},
    "file is gone": {"PBS_NODEFILE": "/nowhere/at/all"},
    "not a name": {"LSB_HOSTS": "a;b"},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_an_error(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_environment(CONTRADICTIONS[name])
    assert caught.value.hint


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_a_node_file_has_a_line_for_each_slot(variable: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    found = from_environment({variable: str(tmp_path / "nodes")})
    assert found is not None
    assert found.hosts == (Host("n1", 2), Host("n2", 1))
    assert found.warnings == ()
