"""GPU options as a function of what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.horovod.frameworks import Framework
from hvdtrain.horovod.gpu import GpuFacts, chips, gpu_options, look_for_gpu, parse_cuda_home, parse_nccl_header, parse_nvcc

TORCH_CPU = Framework("torch", "2.13.0+cpu")
TORCH_CUDA = Framework("torch", "2.14.1", cuda="13.0")
TENSORFLOW_CPU = Framework("tensorflow", "2.21.0")
TENSORFLOW_CUDA = Framework("tensorflow", "2.21.0", cuda="13.0")
NVCC = GpuFacts(nvcc="/usr/local/cuda/bin/nvcc", nvcc_version="13.0")
ALL = GpuFacts(
    "/usr/local/bin/nvcc",
    "13.0",
    "/usr/local/cuda-13.0",
    "/env/nvidia/nccl/include",
    "/env/nvidia/nccl/lib/libnccl.so.2",
    "2.27.7",
)


@pytest.mark.parametrize(
    ("frameworks", "facts", "said"),
    [
        ([TORCH_CPU], ALL, "CPU builds"),
        ([TORCH_CUDA], GpuFacts(), "no nvcc of CUDA 13.0 (conda install cuda-nvcc=13.0"),
        ([TORCH_CUDA], NVCC, "no NCCL (pip install nvidia-nccl-cu13"),
        ([TORCH_CUDA], GpuFacts("/c/bin/nvcc", "12.4", "/c", "/i", "/l"), "nvcc is of CUDA 12.4"),
        ([TORCH_CUDA, TENSORFLOW_CPU], ALL, "tensorflow 2.21.0 (CPU) is a CPU build beside torch 2.14.1 (CUDA 13.0)"),
        ([TORCH_CPU, TENSORFLOW_CUDA], ALL, "torch 2.13.0+cpu (CPU) is a CPU build"),
    ],
)
def test_without_all_that_is_needed_there_are_none_and_it_says_why(
    frameworks: list[Framework], facts: GpuFacts, said: str
) -> None:
    options = gpu_options(frameworks, facts, {})
    assert not options.enabled
    assert said in options.notes[0]


def test_with_all_that_is_needed_they_are_on() -> None:
    options = gpu_options([TORCH_CUDA, TENSORFLOW_CUDA], ALL, {})
    assert options.env == {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_CUDA_HOME": "/usr/local/cuda-13.0",
        "HOROVOD_BUILD_CUDA_CC_LIST": "75,80,90",
    }
    assert options.links == {"include": "/env/nvidia/nccl/include", "lib/libnccl.so": "/env/nvidia/nccl/lib/libnccl.so.2"}
    assert "CUDA 13.0" in options.notes[0]
    assert "NCCL 2.27.7" in options.notes[0]


def test_the_user_decides_when_the_user_says_anything() -> None:
    environ = {"HOROVOD_GPU_ALLREDUCE": "MPI", "HOROVOD_CUDA_HOME": "/c", "HOME": "/root"}
    options = gpu_options([TORCH_CPU], GpuFacts(), environ)
    assert options.env == {"HOROVOD_GPU_ALLREDUCE": "MPI", "HOROVOD_CUDA_HOME": "/c"}
    assert "HOROVOD_GPU_ALLREDUCE" in options.notes[0]


@pytest.mark.parametrize(
    ("version", "expected"), [("13.0", "75,80,90"), ("12.4", "70,80,90"), ("11.2", "60,70,80"), ("", "70,80,90")]
)
def test_chips(version: str, expected: str) -> None:
    assert chips(version) == expected


def test_it_finds_the_package_indexs_nccl_and_the_named_nvcc(tmp_path: Path) -> None:
    nccl, cuda = tmp_path / "site" / "nvidia" / "nccl", tmp_path / "cuda"
    for folder in (nccl / "include", nccl / "lib", cuda / "bin"):
        folder.mkdir(parents=True)
    (nccl / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 7\n")
    (nccl / "lib" / "libnccl.so.2").write_text("")
    nvcc = cuda / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    nvcc.chmod(0o755)
    facts = look_for_gpu("/nowhere", {"HOROVOD_CUDA_HOME": str(cuda)}, [str(tmp_path / "site")])
    assert facts == GpuFacts(str(nvcc), "13.0", str(cuda), str(nccl / "include"), str(nccl / "lib" / "libnccl.so.2"), "2.27.7")


def test_the_toolkit_of_a_wrapper_is_where_nvcc_says() -> None:
    said = "#$ _NVVM_BRANCH_=nvvm\n#$ TOP=/usr/local/cuda-13.0/bin/..\n#$ NVVMIR_LIBRARY_DIR=x\n"
    assert parse_cuda_home(said, "/usr/local/bin/nvcc") == "/usr/local/cuda-13.0"
    assert parse_cuda_home("", "/c/bin/nvcc") == "/c"


def test_parsers_of_unknown_text() -> None:
    assert parse_nvcc("command not found") == ""
    assert parse_nccl_header("") == ""
