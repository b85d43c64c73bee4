"""A rank's place on its host, and what it gets there."""

from __future__ import annotations

import pytest

from hvdtrain.launch.placement import DeviceError, Place, as_started, cuda_names, environment_for, place_of, rank_of

PLACES = {0: Place(0, 0, 0, 3), 2: Place(2, 0, 2, 3), 3: Place(3, 1, 0, 1), 5: Place(5, 2, 1, 2), 6: Place(6, 3, 0, 1)}


@pytest.mark.parametrize("rank", PLACES)
def test_the_place_of_a_rank_comes_from_the_plan(rank: int) -> None:
    assert place_of(rank, [3, 1, 2]) == PLACES[rank]


RANKS = {
    "horovod": ({"HOROVOD_RANK": "3"}, 3),
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
    "pmix": ({"PMIX_RANK": "3"}, 3),
    "pmi": ({"PMI_RANK": "3"}, 3),
    "slurm": ({"SLURM_PROCID": "3"}, 3),
    "lsf": ({"JSM_NAMESPACE_RANK": "3"}, 3),
    "slurm started open mpi's daemon": ({"SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "3"}, 3),
    "nobody": ({"PATH": "/bin"}, 0),
}


@pytest.mark.parametrize("name", RANKS)
def test_the_rank_is_found_under_each_launcher(name: str) -> None:
    environ, rank = RANKS[name]
    assert rank_of(environ) == rank


def test_what_the_launcher_says_about_the_host_counts_more_than_the_plan() -> None:
    planned = Place(2, 1, 0, 2)
    assert as_started(planned, {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == Place(2, 1, 2, 3)
    assert as_started(planned, {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}) == Place(2, 1, 1, 2)
    assert as_started(planned, {"SLURM_LOCALID": "1"}) == planned
    assert as_started(planned, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == planned


#: the user has set all that has a default
SETTLED = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "0", "MALLOC_TOP_PAD_": "0"}


def test_threads_and_waiting_follow_the_cpus_of_the_host() -> None:
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": "glibc.malloc.check=0"}
    roomy = environment_for(Place(0, 0, 0, 2), no_gpu, 8, "", share=False)
    assert roomy == {"OMP_NUM_THREADS": "4", "TF_NUM_INTRAOP_THREADS": "4", "OMPI_MCA_mpi_yield_when_idle": "1"}
    crowded = environment_for(Place(0, 0, 0, 4), no_gpu, 2, "", share=False)
    assert crowded == {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    mine = {**no_gpu, "OMP_NUM_THREADS": "7", "OMPI_MCA_mpi_yield_when_idle": "0"}
    assert environment_for(Place(0, 0, 0, 4), mine, 2, "", share=False) == {"TF_NUM_INTRAOP_THREADS": "7"}
    gloo = {**no_gpu, "HOROVOD_CONTROLLER": "gloo"}
    assert "OMPI_MCA_mpi_yield_when_idle" not in environment_for(Place(0, 0, 0, 4), gloo, 2, "", share=False)


def test_each_local_rank_has_a_gpu_of_its_own_or_is_refused() -> None:
    two = {**SETTLED, "CUDA_VISIBLE_DEVICES": "4,5"}
    assert environment_for(Place(1, 0, 1, 2), two, 8, "", share=False) == {}
    with pytest.raises(DeviceError, match=r"rank 5: local rank 1 of 4, but the host offers 2 GPUs \(4, 5\)"):
        environment_for(Place(5, 1, 1, 4), two, 8, "", share=False)
    assert environment_for(Place(5, 1, 1, 4), two, 8, "", share=True) == {}


def test_chosen_devices_are_those_of_the_host() -> None:
    assert environment_for(Place(3, 1, 0, 2), SETTLED, 8, "0;2,3", share=False) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_device_numbers_count_what_cuda_shows() -> None:
    assert cuda_names([0, 3], {}) == ("0", "3")
    assert cuda_names([1, 0], {"CUDA_VISIBLE_DEVICES": "4,GPU-ab"}) == ("GPU-ab", "4")
    with pytest.raises(DeviceError, match="device 2 was chosen, but CUDA_VISIBLE_DEVICES shows 2: 4,"):
        cuda_names([2], {"CUDA_VISIBLE_DEVICES": "4,5"})
