"""GPU options of a build: a pure function from what was found to Horovod's environment variables and what to say.

``look_for_gpu`` asks the machine, ``gpu_options`` decides.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.horovod.frameworks import Framework
from hvdtrain.horovod.shell import run

#: Variables by which a user decides about GPUs; if one is set, all decisions are the user's.
USER_VARIABLES = (
    "HOROVOD_GPU",
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_ALLREDUCE",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_ALLGATHER",
)
_USER_PREFIXES = ("HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL", "HOROVOD_BUILD_CUDA")


@dataclass(frozen=True)
class GpuFacts:
    """What was found for building with CUDA; empty strings where nothing was."""

    nvcc: str = ""
    nvcc_version: str = ""
    cuda_home: str = ""
    nccl_include: str = ""
    nccl_library: str = ""
    nccl_version: str = ""


@dataclass(frozen=True)
class GpuOptions:
    """The decision. ``links`` are made in the build folder: Horovod wants NCCL as one folder with include and lib."""

    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    """path below the folder that HOROVOD_NCCL_HOME will name -> file or folder to link to"""
    nccl: str = ""
    cuda: str = ""

    @property
    def enabled(self) -> bool:
        return bool(self.env)


def gpu_options(frameworks: Sequence[Framework], facts: GpuFacts, environ: Mapping[str, str]) -> GpuOptions:
    """GPU reductions through NCCL where every framework is a CUDA build and nvcc and NCCL are there; else none, and why."""
    named = [name for name in USER_VARIABLES if environ.get(name)]
    if named:
        env = {
            name: value for name, value in environ.items() if name.startswith(("HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL"))
        }
        return GpuOptions(env, (f"GPU options are taken from the environment: {', '.join(named)}",), cuda=facts.nvcc_version)
    with_cuda = [framework for framework in frameworks if framework.cuda]
    without = [framework for framework in frameworks if not framework.cuda]
    if not with_cuda:
        return GpuOptions(notes=("no GPU options: the installed frameworks are CPU builds",))
    if without:
        note = f"no GPU options: {without[0]} is a CPU build beside {with_cuda[0]}; give each an environment of its own"
        return GpuOptions(notes=(note,))
    if not facts.nvcc:
        version = with_cuda[0].cuda
        get = f"conda install cuda-nvcc={version}, or NVIDIA's packages; then set HOROVOD_CUDA_HOME or PATH"
        return GpuOptions(notes=(f"no GPU options: {with_cuda[0]} was found, but no nvcc of CUDA {version} ({get})",))
    wrong = [framework for framework in with_cuda if _major(framework.cuda or "") not in ("", _major(facts.nvcc_version))]
    if wrong:
        note = f"no GPU options: nvcc is of CUDA {facts.nvcc_version}, but {wrong[0]} was built with another major version"
        return GpuOptions(notes=(note,))
    if not facts.nccl_library or not facts.nccl_include:
        package = f"nvidia-nccl-cu{_major(facts.nvcc_version)}"
        get = f"pip install {package}, or set HOROVOD_NCCL_HOME"
        return GpuOptions(notes=(f"no GPU options: nvcc {facts.nvcc_version} was found, but no NCCL ({get})",))
    env = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_CUDA_HOME": facts.cuda_home,
        "HOROVOD_BUILD_CUDA_CC_LIST": environ.get("HOROVOD_BUILD_CUDA_CC_LIST", chips(facts.nvcc_version)),
    }
    found = f"GPU options: CUDA {facts.nvcc_version} ({facts.nvcc}), NCCL {facts.nccl_version} ({facts.nccl_library})"
    links = {"include": facts.nccl_include, "lib/libnccl.so": facts.nccl_library}
    return GpuOptions(env, (found,), links, nccl=facts.nccl_version or "yes", cuda=facts.nvcc_version)


def chips(cuda_version: str) -> str:
    """The compute capabilities to compile for; CUDA 13 dropped those before 7.5, and 9.0 came with 11.8."""
    match = re.match(r"(\d+)\.(\d+)", cuda_version)
    version = (int(match[1]), int(match[2])) if match else (12, 0)
    if version >= (13, 0):
        return "75,80,90"
    return "70,80,90" if version >= (11, 8) else "60,70,80"


def look_for_gpu(path: str, environ: Mapping[str, str], site_folders: Sequence[str] | None = None) -> GpuFacts:
    """Find nvcc and NCCL where users have them: the named folders, PATH, /usr/local/cuda, and the package index's wheels."""
    home = environ.get("HOROVOD_CUDA_HOME") or environ.get("CUDA_HOME")
    search = [f"{home}/bin"] if home else []
    nvcc = shutil.which("nvcc", path=":".join([*search, path, "/usr/local/cuda/bin"])) or ""
    include, library = _find_nccl(environ, _site_folders() if site_folders is None else site_folders)
    return GpuFacts(
        nvcc=nvcc,
        nvcc_version=parse_nvcc(run([nvcc, "--version"], timeout_s=30).output) if nvcc else "",
        cuda_home=parse_cuda_home(run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], timeout_s=30).output, nvcc) if nvcc else "",
        nccl_include=include,
        nccl_library=library,
        nccl_version=parse_nccl_header(Path(include, "nccl.h").read_text(errors="replace")) if include else "",
    )


def parse_nvcc(text: str) -> str:
    """The version from ``nvcc --version``."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else ""


def parse_cuda_home(text: str, nvcc: str) -> str:
    """The toolkit's folder from ``nvcc --dryrun``: the program on PATH may be a wrapper that lies elsewhere."""
    match = re.search(r"^#\$ TOP=(\S+)$", text, re.MULTILINE)
    return os.path.normpath(match[1]) if match else str(Path(nvcc).resolve().parent.parent)


def parse_nccl_header(text: str) -> str:
    """The version from ``nccl.h``."""
    parts = [re.search(rf"#define\s+NCCL_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part)


def _find_nccl(environ: Mapping[str, str], site_folders: Sequence[str]) -> tuple[str, str]:
    """NCCL's include folder and library file; both empty unless both are there."""
    homes = [Path(environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)]
    homes += [Path(folder, "nvidia", "nccl") for folder in site_folders]
    homes += [Path(environ[name]) for name in ("CONDA_PREFIX", "CUDA_HOME") if environ.get(name)]
    homes += [Path("/usr/local/cuda"), Path("/usr")]
    for home in homes:
        if not (home / "include" / "nccl.h").is_file():
            continue
        for pattern in ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*-linux-gnu/libnccl.so*"):
            for library in sorted(home.glob(pattern)):
                return str(home / "include"), str(library)
    return "", ""


def _site_folders() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]))


def _major(version: str) -> str:
    match = re.match(r"\d+", version)
    return match[0] if match else ""
