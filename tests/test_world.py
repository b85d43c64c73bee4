"""The rank context, from what each launcher sets in the environment."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.world import LAUNCHERS, World, is_identity

HOROVOD_GLOO = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "3",
    "HOROVOD_CONTROLLER": "gloo",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "7"}
SLURM_BATCH = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SLURM_STEP = SLURM_BATCH | {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SALLOC = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}

#: environment -> source, rank, size, local rank, local size, node rank, number of nodes
FIXTURES = {
    "nothing": ({"PATH": "/bin"}, ("single process", 0, 1, 0, 1, 0, 1)),
    "horovodrun with Gloo": (HOROVOD_GLOO, ("horovod", 3, 6, 0, 1, 1, 3)),
    "mpirun of Open MPI": (OPEN_MPI, ("open mpi", 5, 8, 1, 4, 0, 1)),
    "horovodrun over Open MPI": (OPEN_MPI | {"HOROVOD_CYCLE_TIME": "1"}, ("open mpi", 5, 8, 1, 4, 0, 1)),
    "mpiexec of MPICH or Intel": (HYDRA, ("pmi", 2, 4, 0, 2, 0, 1)),
    "srun": (SLURM_STEP, ("slurm", 3, 4, 1, 2, 1, 2)),
    "srun --mpi=pmi2": (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("pmi", 3, 4, 0, 1, 0, 1)),
    "srun --mpi=pmix": (SLURM_STEP | {"PMIX_RANK": "3"}, ("slurm", 3, 4, 1, 2, 1, 2)),
    "batch script of Slurm": (SLURM_BATCH, ("single process", 0, 1, 0, 1, 0, 1)),
    "shell of salloc": (SALLOC, ("single process", 0, 1, 0, 1, 0, 1)),
    "mpirun in a batch script": (SLURM_BATCH | OPEN_MPI, ("open mpi", 5, 8, 1, 4, 0, 1)),
    # srun starts one daemon a node; the ranks inherit the daemon's variables
    "mpirun over srun": (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI, ("open mpi", 5, 8, 1, 4, 0, 1)),
    "hydra over srun": (SLURM_STEP | HYDRA, ("pmi", 2, 4, 0, 2, 0, 1)),
    "jsrun": (JSRUN, ("jsrun", 3, 4, 1, 2, 0, 1)),
    "torchrun": (TORCHRUN, ("torchrun", 3, 4, 1, 2, 1, 2)),
    "mpirun and variables for torch.distributed": (TORCHRUN | OPEN_MPI, ("open mpi", 5, 8, 1, 4, 0, 1)),
    "both, and they agree": (
        OPEN_MPI | {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8"},
        ("horovod", 5, 8, 0, 1, 0, 1),
    ),
    "empty variables": ({"HOROVOD_RANK": "", "HOROVOD_SIZE": "", "RANK": ""}, ("single process", 0, 1, 0, 1, 0, 1)),
    "a RANK that is no torchrun's": ({"RANK": "captain"}, ("single process", 0, 1, 0, 1, 0, 1)),
    "spaces around a number": ({"PMI_RANK": " 1 ", "PMI_SIZE": "2\n"}, ("pmi", 1, 2, 0, 1, 0, 1)),
    # variables of a launcher that does not win are nobody's business
    "rubbish of others": (OPEN_MPI | {"RANK": "x", "WORLD_SIZE": "y"}, ("open mpi", 5, 8, 1, 4, 0, 1)),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_each_launcher_is_recognised(name: str) -> None:
    environ, expected = FIXTURES[name]
    world = World.from_env(environ)
    found = (world.source, world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes)
    assert found == expected


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World.from_env() == World()
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "3")
    assert (World.from_env().rank, World.from_env().size) == (1, 3)


@pytest.mark.parametrize("change", [{"HOROVOD_RANK": "4"}, {"HOROVOD_SIZE": "9"}, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}])
def test_horovod_and_open_mpi_that_contradict_each_other_are_refused(change: dict[str, str]) -> None:
    environ = OPEN_MPI | {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8"} | change
    with pytest.raises(HvdtrainError, match=r"horovod says rank .* open mpi says rank 5 of 8") as error:
        World.from_env(environ)
    assert "unset" in error.value.hint


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (HOROVOD_GLOO | {"HOROVOD_RANK": "6"}, "horovod contradicts itself: rank 6 of 6"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "rank -1 of 8"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "0"}, "rank 5 of 0"),
        (HYDRA | {"MPI_LOCALRANKID": "2"}, "local rank 2 of 2"),
        (SLURM_STEP | {"SLURM_NODEID": "2"}, "node 2 of 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(HvdtrainError, match=message):
        World.from_env(environ)


@pytest.mark.parametrize("value", ["two", "1.5", "0x1", "1;2"])
@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (HOROVOD_GLOO, "HOROVOD_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (HYDRA, "MPI_LOCALNRANKS"),
        (SLURM_STEP, "SLURM_NODEID"),
        (TORCHRUN, "WORLD_SIZE"),
    ],
)
def test_a_value_that_is_no_number_is_named(environ: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(UsageError) as error:
        World.from_env(environ | {name: value})
    assert error.value.message == f"{name} must be a whole number, got {value!r}"


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"])
def test_a_rank_without_a_size_does_not_train_alone(name: str) -> None:
    with pytest.raises(HvdtrainError, match=f"{name} says that this is rank 1 of a job"):
        World.from_env({name: "1"})


def test_uneven_nodes_are_counted_from_the_hosts_of_the_ranks() -> None:
    hosts = ["a", "a", "a", "b", "c", "c"]
    worlds = [World(rank, 6, source="pmi").with_hosts(hosts) for rank in range(6)]
    assert [world.local_rank for world in worlds] == [0, 1, 2, 0, 0, 1]
    assert [world.local_size for world in worlds] == [3, 3, 3, 1, 2, 2]
    assert [world.node_rank for world in worlds] == [0, 0, 0, 1, 2, 2]
    assert {(world.num_nodes, world.size, world.source) for world in worlds} == {(3, 6, "pmi")}


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12))
def test_any_placement_of_ranks_gives_each_its_own_place(hosts: list[str]) -> None:
    worlds = [World(rank, len(hosts)).with_hosts(hosts) for rank in range(len(hosts))]
    places = {(world.node_rank, world.local_rank) for world in worlds}
    assert len(places) == len(hosts)
    for world, host in zip(worlds, hosts, strict=True):
        assert world.local_size == hosts.count(host)
        assert world.num_nodes == len(set(hosts))
        assert [other.rank for other in worlds if other.node_rank == world.node_rank] == [
            rank for rank, name in enumerate(hosts) if name == host
        ]


def test_hosts_of_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 hosts for 3 ranks"):
        World(0, 3).with_hosts(["a", "b"])


def test_a_world_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1  # type: ignore[misc]


def test_only_rank_0_is_primary() -> None:
    assert [World(rank, 3).is_primary for rank in range(3)] == [True, False, False]


def test_every_name_that_is_read_is_known_as_another_processs_identity() -> None:
    names = [name for source, row in LAUNCHERS.items() if source not in ("slurm", "torchrun") for name in row if name]
    assert [name for name in names if not is_identity(name)] == []
    more = ("HOROVOD_HOSTNAME", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "PMI_FD", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_NODE_RANK")
    more += ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_orte_hnp_uri")
    more += ("OMPI_MCA_orte_xml_output", "HYDRA_BSTRAP_PROXY_ID", "I_MPI_HYDRA_UUID")
    assert [name for name in more if not is_identity(name)] == []
    others = ("SLURM_PROCID", "RANK", "PMIX_MCA_gds", "OMPI_MCA_btl", "HOROVOD_CYCLE_TIME", "HOROVOD_RANK_ORDER", "I_MPI_PIN")
    others += ("HOROVOD_GLOO_TIMEOUT_SECONDS", "OMPI_MCA_orte_tmpdir_base", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BRANCH_COUNT")
    assert [name for name in others if is_identity(name)] == []
