"""The named changes to Horovod 0.28.1's source that let it build for current frameworks, quickly.

Horovod 0.28.1 (June 2023) is the last release and does not compile against current PyTorch or TensorFlow. Each change is one
function from a file's text to its new text, with a docstring that says why it is there and when it can go. Nothing here
touches the disk except :func:`apply_changes`.

A change that does not find the text it replaces raises: a silently unpatched source would fail minutes later and far away.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.buildinfo import FILE_NAME as BUILD_INFO_FILE

HOROVOD_VERSION = "0.28.1"

#: Environment variable by which the patched CMake files receive the library search path of the built extensions.
RPATH_VARIABLE = "HVDTRAIN_RPATH"


@dataclass(frozen=True)
class SourcePlan:
    """What the source has to be changed for."""

    frameworks: tuple[str, ...]
    torch_cxx_standard: int = 17
    share_common: bool = False
    """The frameworks have the same C++ ABI and the build is not for GPUs, so common objects can serve both."""
    gpu: bool = False
    """with GPU options"""


@dataclass(frozen=True)
class Change:
    """One named change: which file, how, and whether a plan needs it."""

    path: str
    edit: Callable[[str, SourcePlan], str]
    needed: Callable[[SourcePlan], bool] = lambda plan: True

    @property
    def name(self) -> str:
        return self.edit.__name__


class ChangeError(HvdtrainError):
    """A change did not find the text it is meant to replace."""


def _replace(text: str, old: str, new: str) -> str:
    if old not in text:
        raise ChangeError(f"the text to replace is not there: {old.splitlines()[0]!r}")
    return text.replace(old, new)


def _replace_from(text: str, begin: str, end: str, new: str) -> str:
    """Replace what stands from ``begin`` up to the ``end`` after it; the end stays."""
    start = text.find(begin)
    stop = text.find(end, start)
    if start < 0 or stop < 0:
        raise ChangeError(f"the text to replace is not there: {begin!r}")
    return text[:start] + new + text[stop:]


def compile_as_cxx17(text: str, plan: SourcePlan) -> str:
    """Top CMakeLists.txt asks for C++14; the headers of TensorFlow >= 2.10 and PyTorch >= 2.1 need C++17.

    Goes when a Horovod release sets 17 (its main branch does).
    """
    return _replace(text, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")


def compile_torch_as_it_needs(text: str, plan: SourcePlan) -> str:
    """horovod/torch sets C++14 again, for itself; PyTorch >= 2.1 refuses that, and newer ones (2.14) need C++20.

    Goes when a Horovod release follows the installed PyTorch.
    """
    return _replace(text, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {plan.torch_cxx_standard})")


def leave_out_xla_ops(text: str, plan: SourcePlan) -> str:
    """xla_mpi_ops.cc needs headers that TensorFlow's wheels no longer carry (highwayhash, farmhash) or that moved.

    It only serves HOROVOD_ENABLE_XLA_OPS, which is off by default. Goes when a Horovod release builds it again.
    """
    line = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
    return _replace(text, line, "")


def build_one_gloo(text: str, plan: SourcePlan) -> str:
    """TensorFlow >= 2.10 gets a second copy of Gloo, compiled as C++17; now that everything is C++17 one copy serves both.

    Saves 40 files. Goes together with :func:`compile_as_cxx17`.
    """
    return _replace(text, "set(Tensorflow_CXX17 TRUE)", "set(Tensorflow_CXX17 FALSE)")


def compile_common_once(text: str, plan: SourcePlan) -> str:
    """The common sources are compiled for each framework; with one ABI the objects are the same, so share them.

    TensorFlow's directory comes first and its Eigen and FlatBuffers headers are used for both, as upstream does.
    Goes when a Horovod release builds an object library itself.
    """
    old = "add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})\n"
    new = (
        "add_library(horovod_common OBJECT ${SOURCES})\n"
        "target_include_directories(horovod_common PRIVATE ${EIGEN_INCLUDE_PATH} ${FLATBUFFERS_INCLUDE_PATH})\n"
        "add_library(${TF_TARGET_LIB} SHARED $<TARGET_OBJECTS:horovod_common> ${TF_SOURCES})\n"
    )
    return _replace(text, old, new)


def use_common_objects(text: str, plan: SourcePlan) -> str:
    """PyTorch's half of :func:`compile_common_once`: link the objects made for TensorFlow. Goes together with it."""
    old = "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})"
    return _replace(text, old, "add_library(${PYTORCH_TARGET_LIB} SHARED $<TARGET_OBJECTS:horovod_common> ${PYTORCH_SOURCES})")


def build_without_debug_symbols(text: str, plan: SourcePlan) -> str:
    """setup.py builds with debug symbols, which cost a third of the time and most of the wheel's size.

    Goes when a Horovod release lets the build type be chosen.
    """
    return _replace(text, "'RelWithDebInfo'", "'Release'")


def fetch_nothing_while_building(text: str, plan: SourcePlan) -> str:
    """setup_requires makes setuptools download run-time requirements as eggs during the build, past pip's settings.

    They are installed with the wheel. Goes when Horovod has a pyproject.toml.
    """
    return _replace(text, "setup_requires=require_list if is_build_action() else [],", "setup_requires=[],")


def find_python_headers_without_distutils(text: str, plan: SourcePlan) -> str:
    """CMake asks ``distutils``, which Python 3.12 removed. Goes when a Horovod release asks ``sysconfig``."""
    old = "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
    return _replace(text, old, "import sysconfig; print(sysconfig.get_paths()['include'])")


def accept_cmake_4(text: str, plan: SourcePlan) -> str:
    """The vendored Gloo declares CMake 2.8.12, and CMake 4 refuses anything below 3.5. Goes with a newer Gloo."""
    return _replace(
        text, "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)", "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)"
    )


def carry_build_information(text: str, plan: SourcePlan) -> str:
    """The wheel takes along a file that says what it was built for, so that `status` can tell when that has changed.

    Ours, so it stays.
    """
    return _replace(text, "zip_safe=False,", f"zip_safe=False,\n      package_data={{'horovod': ['{BUILD_INFO_FILE}']}},")


def look_for_cuda_only_when_asked(text: str, plan: SourcePlan) -> str:
    """CMake enables CUDA wherever it finds an nvcc, and fails if that does not work, also for a build without GPU options.

    Goes when a Horovod release asks for CUDA only where HOROVOD_GPU_OPERATIONS is set.
    """
    return _replace(text, "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n", "if(FALSE)\n")


def ask_torch_once(text: str, plan: SourcePlan) -> str:
    """FindPytorch.cmake starts seven processes that each import PyTorch (2 to 5 s each): ask everything in one.

    A CUDA build of PyTorch beside an nvcc would also turn CUDA on here by itself; without GPU options it stays off. Goes
    when a Horovod release asks once.
    """
    first = 'execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"'
    libraries = "foreach(_LIB IN LISTS _Pytorch_LIBRARIES)"
    abi = 'execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.torch.compiled_with_cxx11_abi())"'
    flags = "if (Pytorch_CXX11)"
    text = _replace_from(text, first, libraries, _ASK_TORCH)
    return _replace_from(text, abi, flags, "")


_ASK_TORCH = """set(_ASK_PYTORCH [==[
import os, sys
out, sys.stdout = sys.stdout, open(os.devnull, "w")
import torch
from torch.utils.cpp_extension import CppExtension
extension = CppExtension("", [])
print(f'set(Pytorch_VERSION "{torch.__version__}")', file=out)
print(f'set(Pytorch_INCLUDE_DIRS "{";".join(extension.include_dirs)}")', file=out)
print(f'set(Pytorch_LIBRARY_DIRS "{";".join(extension.library_dirs)}")', file=out)
print(f'set(_Pytorch_LIBRARIES "{";".join(extension.libraries)}")', file=out)
print(f'set(Pytorch_CXX11 "{str(torch.compiled_with_cxx11_abi()).upper()}")', file=out)
]==])
execute_process(COMMAND ${PY_EXE} -c "${_ASK_PYTORCH}" OUTPUT_FILE "${CMAKE_BINARY_DIR}/pytorch.cmake")
include("${CMAKE_BINARY_DIR}/pytorch.cmake")
set(Pytorch_CUDA FALSE)
set(Pytorch_ROCM FALSE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
if(NOT PYTORCH_FOUND)
    return()
endif()

"""


def find_libraries_relative_to_the_package(text: str, plan: SourcePlan) -> str:
    """CMake writes the build environment's absolute paths into the extensions; a cached wheel serves other environments too.

    The search path comes from the environment instead, relative to the extension. Goes when wheels are not reused.
    """
    old = "project(horovod CXX)\n"
    new = f'{old}set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "$ENV{{{RPATH_VARIABLE}}}")\n'
    return _replace(text, old, new)


def _shares(plan: SourcePlan) -> bool:
    return plan.share_common and {"torch", "tensorflow"} <= set(plan.frameworks)


CHANGES = (
    Change("CMakeLists.txt", compile_as_cxx17),
    Change("CMakeLists.txt", find_libraries_relative_to_the_package),
    Change("CMakeLists.txt", look_for_cuda_only_when_asked, lambda plan: not plan.gpu),
    Change("cmake/Modules/FindPytorch.cmake", ask_torch_once, lambda plan: "torch" in plan.frameworks and not plan.gpu),
    Change("setup.py", build_without_debug_symbols),
    Change("setup.py", fetch_nothing_while_building),
    Change("setup.py", carry_build_information),
    Change("third_party/gloo/CMakeLists.txt", accept_cmake_4),
    Change("horovod/torch/CMakeLists.txt", compile_torch_as_it_needs, lambda plan: "torch" in plan.frameworks),
    Change("horovod/torch/CMakeLists.txt", find_python_headers_without_distutils, lambda plan: "torch" in plan.frameworks),
    Change("horovod/torch/CMakeLists.txt", use_common_objects, _shares),
    Change("horovod/tensorflow/CMakeLists.txt", leave_out_xla_ops, lambda plan: "tensorflow" in plan.frameworks),
    Change("horovod/tensorflow/CMakeLists.txt", build_one_gloo, lambda plan: "tensorflow" in plan.frameworks),
    Change("horovod/tensorflow/CMakeLists.txt", compile_common_once, _shares),
)


def changes_for(plan: SourcePlan) -> tuple[Change, ...]:
    """The changes this plan needs, in order."""
    return tuple(change for change in CHANGES if change.needed(plan))


def apply_changes(source: Path, plan: SourcePlan) -> tuple[str, ...]:
    """Edit the unpacked source in place and return the names of the changes made."""
    changes = changes_for(plan)
    for change in changes:
        path = source / change.path
        try:
            path.write_text(change.edit(path.read_text(encoding="utf-8"), plan), encoding="utf-8")
        except (ChangeError, OSError) as error:
            message = f"change '{change.name}' does not fit {change.path} of Horovod {HOROVOD_VERSION}: {error}"
            raise HvdtrainError(
                message, "remove the cached source with 'hvdtrain horovod uninstall --cache' and try again"
            ) from error
    return tuple(change.name for change in changes)


def changes_digest(changes: Iterable[Change] = CHANGES) -> str:
    """A digest of the changes' own source text: an edited change gives another cache key without anybody counting versions."""
    digest = hashlib.sha256()
    for change in changes:
        digest.update(f"{change.path}\n{inspect.getsource(change.edit)}\n".encode())
    digest.update(_ASK_TORCH.encode())
    return digest.hexdigest()[:12]
