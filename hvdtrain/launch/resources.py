"""What this machine gives to its ranks: CPUs that may really be used, and GPUs. Standard library only; used on every host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def usable_cpus(affinity: int, root: Path = Path("/")) -> int:
    """CPUs that this process may use: the smaller of its affinity and its control groups' quota, at least 1.

    Inside a container ``os.cpu_count()`` and the affinity show the whole machine; only the quota tells the truth.
    """
    quotas = [quota for quota in _quotas(root) if quota > 0]
    return max(1, int(min([float(affinity), *quotas])))


def affinity() -> int:
    """CPUs in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(cpus: int, local_ranks: int) -> int:
    return max(1, cpus // max(1, local_ranks))


def _quotas(root: Path) -> list[float]:
    """The quotas (in CPUs) of this process's control groups and all their ancestors, version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            for base in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                quotas += [_v2(folder / "cpu.max") for folder in _upwards(root / base, path)]
        elif "cpu" in controllers.split(","):
            for base in (f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"):
                quotas += [_v1(folder) for folder in _upwards(root / base, path)]
    return quotas


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and its ancestors down to the mount; in a container the path may lie outside of what is mounted."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _v2(path: Path) -> float:
    try:
        quota, period = path.read_text(encoding="utf-8").split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def _v1(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        return quota / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """The GPUs that a process with this environment sees, by the names CUDA uses, in the order of CUDA's device numbers."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        found = [path.name for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)]
        return tuple(sorted((name.removeprefix("nvidia") for name in found), key=int))
    devices: list[str] = []
    for item in listed.split(","):
        if not item.strip() or item.strip().startswith("-") or item.strip() == "NoDevFiles":
            break  # CUDA stops reading at the first one that it does not know
        devices.append(item.strip())
    return tuple(dict.fromkeys(devices))  # one that is named twice is one device


def gpus_are_bound(environ: Mapping[str, str]) -> bool:
    """Whether Slurm shows each task GPUs of its own already (``--gpus-per-task``, ``--gpu-bind``): then what a rank sees is its.

    ``--gpu-bind=none`` shows every task all of them, also with GPUs per task. TRES per task may be CPUs alone.
    """
    bind = environ.get("SLURM_GPU_BIND", "").removeprefix("verbose,")
    per_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return bind != "none" and bool(bind or per_task)
