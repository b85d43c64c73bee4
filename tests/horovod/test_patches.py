"""The changes to Horovod's source, on excerpts of the real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import patches
from hvdtrain.horovod.patches import CHANGES, SourcePlan, apply_changes, changes_digest, changes_for

BOTH = SourcePlan(("torch", "tensorflow"), torch_cxx_standard=17, share_common=True)

SOURCE = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.13 FATAL_ERROR)
project(horovod CXX)

set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit)
endif()
""",
    "cmake/Modules/FindPytorch.cmake": """\
list(APPEND CMAKE_PREFIX_PATH ${Pytorch_ROOT})

execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"
                OUTPUT_VARIABLE Pytorch_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE)
execute_process(COMMAND ${PY_EXE} -c "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)"
                OUTPUT_VARIABLE Pytorch_CUDA OUTPUT_STRIP_TRAILING_WHITESPACE)
foreach(_LIB IN LISTS _Pytorch_LIBRARIES)
    list(APPEND Pytorch_LIBRARIES ${FOUND_LIB_${_LIB}})
endforeach()

execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.torch.compiled_with_cxx11_abi())"
                OUTPUT_VARIABLE Pytorch_CXX11 OUTPUT_STRIP_TRAILING_WHITESPACE)
string(TOUPPER ${Pytorch_CXX11} Pytorch_CXX11)
if (Pytorch_CXX11)
    set(Pytorch_COMPILE_FLAGS "${Pytorch_COMPILE_FLAGS} -D_GLIBCXX_USE_CXX11_ABI=1")
endif()
""",
    "setup.py": """        config = 'Debug' if self.debug or os.environ.get('HOROVOD_DEBUG') == "1" else 'RelWithDebInfo'
      setup_requires=require_list if is_build_action() else [],
      install_requires=require_list,
      python_requires='>=3.6',
      zip_safe=False,
      entry_points={
""",
    "third_party/gloo/CMakeLists.txt": "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)\n\nproject(gloo CXX C)\n",
    "horovod/torch/CMakeLists.txt": """\
execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
                OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})
""",
    "horovod/tensorflow/CMakeLists.txt": """if (Tensorflow_VERSION VERSION_GREATER_EQUAL "2.10")
    set(CMAKE_CXX_STANDARD 17)
    set(Tensorflow_CXX17 TRUE)
else()
    set(Tensorflow_CXX17 FALSE)
endif()
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
""",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in SOURCE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_all_changes_apply_once_to_the_released_text(source: Path) -> None:
    assert len(apply_changes(source, BOTH)) == len(CHANGES)
    top = (source / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in top
    assert "check_language" not in top
    assert 'set(CMAKE_INSTALL_RPATH "$ENV{HVDTRAIN_RPATH}")' in top
    find = (source / "cmake/Modules/FindPytorch.cmake").read_text()
    assert find.count("execute_process") == 1
    assert "set(Pytorch_CUDA FALSE)" in find
    assert find.index("include(") < find.index("foreach(_LIB") < find.index("if (Pytorch_CXX11)")
    tensorflow = (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "xla_mpi_ops.cc" not in tensorflow
    assert "mpi_ops.cc" in tensorflow
    assert "TRUE" not in tensorflow
    assert "add_library(horovod_common OBJECT ${SOURCES})" in tensorflow
    torch = (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "distutils" not in torch
    assert "$<TARGET_OBJECTS:horovod_common>" in torch
    setup = (source / "setup.py").read_text()
    assert "RelWithDebInfo" not in setup
    assert "package_data={'horovod': ['hvdtrain_build.json']}" in setup


def test_a_second_application_is_refused(source: Path) -> None:
    apply_changes(source, BOTH)
    with pytest.raises(HvdtrainError, match=r"compile_as_cxx17.*does not fit CMakeLists\.txt"):
        apply_changes(source, BOTH)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_that_does_not_find_its_text_says_so(change: patches.Change) -> None:
    with pytest.raises(patches.ChangeError, match="not there"):
        change.edit("another text\n", BOTH)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_every_change_says_why_it_is_there(change: patches.Change) -> None:
    assert change.edit.__doc__ is not None
    assert len(change.edit.__doc__) > 60


def test_torch_gets_the_standard_that_it_needs() -> None:
    edited = patches.compile_torch_as_it_needs(SOURCE["horovod/torch/CMakeLists.txt"], SourcePlan(("torch",), 20))
    assert "set(CMAKE_CXX_STANDARD 20)" in edited


@pytest.mark.parametrize(
    ("plan", "absent"),
    [
        (SourcePlan(("torch",)), {"leave_out_xla_ops", "build_one_gloo", "compile_common_once", "use_common_objects"}),
        (SourcePlan(("torch",), share_common=True), {"compile_common_once", "use_common_objects"}),
        (SourcePlan(("tensorflow",)), {"compile_torch_as_it_needs", "use_common_objects"}),
        (SourcePlan(("torch", "tensorflow"), share_common=False), {"compile_common_once", "use_common_objects"}),
        (SourcePlan(("torch",), gpu=True), {"look_for_cuda_only_when_asked", "ask_torch_once"}),
    ],
    ids=["torch", "torch-alone-shares-nothing", "tensorflow", "two-abis", "gpu"],
)
def test_only_the_needed_changes_are_made(plan: SourcePlan, absent: set[str]) -> None:
    assert absent.isdisjoint(change.name for change in changes_for(plan))


def test_the_digest_follows_the_changes() -> None:
    assert changes_digest(CHANGES) == changes_digest(CHANGES)
    assert changes_digest(CHANGES) != changes_digest(CHANGES[1:])
