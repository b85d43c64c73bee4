"""CPUs under control groups, GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.launch import resources

#: name -> (affinity, files below the root, usable CPUs)
CGROUPS: dict[str, tuple[int, dict[str, str], int]] = {
    "v2 in a container": (8, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "v1": (
        8,
        {
            "proc/self/cgroup": "12:memory:/\n4:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
    "v2 nested, the limit is on a parent": (
        16,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "max 100000\n",
        },
        4,
    ),
    "v2 no limit": (8, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
    "half a CPU is one": (8, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "v1 no limit": (
        8,
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    "path outside of what the container sees": (
        8,
        {"proc/self/cgroup": "0::/../../docker/abc\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"},
        3,
    ),
    "affinity is the smaller": (2, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 2),
    "no control groups": (3, {}, 3),
    "nonsense": (3, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "x\n"}, 3),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_quota_counts_not_the_machine(name: str, tmp_path: Path) -> None:
    affinity, files, expected = CGROUPS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert resources.usable_cpus(affinity, tmp_path) == expected


def test_this_machine_has_at_least_one_cpu() -> None:
    assert 1 <= resources.usable_cpus(resources.affinity()) <= resources.affinity()


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_threads_are_the_cpus_over_the_local_ranks(cpus: int, ranks: int, threads: int) -> None:
    assert resources.threads_per_rank(cpus, ranks) == threads


GPUS = {"4,5": ("4", "5"), "": (), "-1": (), "0,-1,1": ("0",), "GPU-8d,GPU-9e": ("GPU-8d", "GPU-9e"), "NoDevFiles": ()}
GPUS["3,0,3"] = ("3", "0")


@pytest.mark.parametrize("value", GPUS)
def test_visible_devices_are_read_as_cuda_reads_them_and_each_counts_once(value: str, tmp_path: Path) -> None:
    assert resources.gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == GPUS[value]


def test_device_files_are_counted_in_order(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert resources.gpus({}, tmp_path) == ("0", "2", "10")
    assert resources.gpus({}, tmp_path / "nothing") == ()


BOUND = {
    ("SLURM_GPUS_PER_TASK=1",): True,
    ("SLURM_TRES_PER_TASK=cpu=2,gres/gpu:a100=1",): True,
    ("SLURM_TRES_PER_TASK=cpu=1",): False,
    ("SLURM_GPU_BIND=map_gpu:0,1",): True,
    ("SLURM_GPU_BIND=none",): False,
    ("SLURM_GPU_BIND=verbose,none", "SLURM_GPUS_PER_TASK=1"): False,
    (): False,
}


@pytest.mark.parametrize("variables", BOUND)
def test_gpus_are_bound_where_slurm_gives_each_task_its_own(variables: tuple[str, ...]) -> None:
    environ = dict(item.split("=", 1) for item in variables)
    assert resources.gpus_are_bound(environ) == BOUND[variables]
