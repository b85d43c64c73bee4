"""What to build, as a value: everything that matters to the result, hence the cache key and the build's environment."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod.buildinfo import EXTENSIONS, BuildInfo
from hvdtrain.horovod.cache import cache_key
from hvdtrain.horovod.frameworks import Framework
from hvdtrain.horovod.gpu import GpuOptions
from hvdtrain.horovod.mpi import Mpi, search_folders
from hvdtrain.horovod.patches import HOROVOD_VERSION, RPATH_VARIABLE, SourcePlan, changes_digest, changes_for
from hvdtrain.horovod.toolchain import Toolchain, torch_cxx_standard

#: framework -> Horovod's name for it in HOROVOD_WITH_... and HOROVOD_WITHOUT_...
_SWITCHES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW", "mxnet": "MXNET"}

#: Variables of the user's that change what is built.
_COMPILER_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "HOROVOD_CPU_OPERATIONS", "HOROVOD_BUILD_ARCH_FLAGS")

#: Variables that would confuse the build: another make's, and switches that this plan decides.
_NOT_PASSED_ON = (
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "MAKEOVERRIDES",
    "HOROVOD_DEBUG",
    "HOROVOD_SKIP_COMPILE",
    "HOROVOD_LOCAL_VERSION",
)


@dataclass(frozen=True)
class PythonFacts:
    """The interpreter's binary facts."""

    abi: str
    platform: str
    libc: str
    site_folder: str
    """where packages with extensions are installed"""
    prefix: str

    @classmethod
    def here(cls) -> PythonFacts:
        abi = str(sysconfig.get_config_var("SOABI"))
        return cls(abi, sysconfig.get_platform(), " ".join(platform.libc_ver()), sysconfig.get_path("platlib"), sys.prefix)


@dataclass(frozen=True)
class Plan:
    """One build of Horovod."""

    frameworks: tuple[Framework, ...]
    mpi: Mpi
    tools: Toolchain
    gpu: GpuOptions
    python: PythonFacts
    jobs: int
    arch_flags: str
    compiler_variables: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(framework.name for framework in self.frameworks)

    @property
    def cxx_standard(self) -> int:
        """The highest C++ standard that a framework needs."""
        return max([17, *(torch_cxx_standard(framework.version) for framework in self.frameworks if framework.name == "torch")])

    @property
    def source(self) -> SourcePlan:
        one_abi = len({framework.cxx11_abi for framework in self.frameworks}) == 1
        return SourcePlan(
            self.names,
            self.cxx_standard,
            share_common=one_abi and not self.gpu.enabled,
            gpu=self.gpu.enabled,
        )

    @property
    def search_folders(self) -> tuple[str, ...]:
        """The extensions' library search path, good in every environment of this layout."""
        extensions = [Path(self.python.site_folder, "horovod", EXTENSIONS[name]).parent for name in self.names]
        # every extension lies equally deep, so one search path serves them all
        folders = search_folders(self.mpi, str(extensions[0]), self.python.prefix) if extensions else ()
        return (*folders, "$ORIGIN/../../torch/lib")

    @property
    def parts(self) -> dict[str, object]:
        """What the cache key is made of."""
        return {
            "horovod": HOROVOD_VERSION,
            "changes": changes_digest(changes_for(self.source)),
            "python": [self.python.abi, self.python.platform, self.python.libc],
            "frameworks": [[f.name, f.version, f.cxx11_abi, f.cuda] for f in self.frameworks],
            "mpi": [self.mpi.family, self.mpi.version, list(self.search_folders)],
            "compiler": [self.tools.compiler_version, self.cxx_standard, self.arch_flags, dict(self.compiler_variables)],
            "gpu": [dict(self.gpu.env), self.gpu.cuda, self.gpu.nccl],
        }

    @property
    def key(self) -> str:
        return cache_key(self.parts)

    def build_info(self) -> BuildInfo:
        """The record that travels in the wheel."""
        return BuildInfo(
            horovod=HOROVOD_VERSION,
            frameworks={framework.name: framework.version for framework in self.frameworks},
            python=self.python.abi,
            mpi=str(self.mpi),
            gloo=True,
            nccl=self.gpu.nccl,
            cuda=self.gpu.cuda if self.gpu.enabled else "",
            compiler=self.tools.compiler_version,
            cxx_standard=self.cxx_standard,
            changes=tuple(change.name for change in changes_for(self.source)),
            key=self.key,
        )


def compiler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's variables that change what is built."""
    return {name: environ[name] for name in _COMPILER_VARIABLES if environ.get(name)}


def build_environment(
    plan: Plan, environ: Mapping[str, str], *, path: str, tools_folder: Path, nccl_home: Path, cmake: str
) -> dict[str, str]:
    """The environment of Horovod's setup.py: exactly the plan's frameworks, MPI and Gloo, and nothing left over."""
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON and not name.startswith("HOROVOD_WITH")}
    env["PATH"] = path
    env["PYTHONPATH"] = os.pathsep.join([str(tools_folder), *filter(None, [environ.get("PYTHONPATH")])])
    env |= {f"HOROVOD_{'WITH' if name in plan.names else 'WITHOUT'}_{switch}": "1" for name, switch in _SWITCHES.items()}
    env |= {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_CMAKE": cmake, "MAKEFLAGS": f"-j{plan.jobs}"}
    if not plan.gpu.enabled:
        env.pop("HOROVOD_CUDA_HOME", None)
    env |= plan.gpu.env
    if plan.gpu.links:
        env["HOROVOD_NCCL_HOME"] = str(nccl_home)
    if plan.arch_flags:
        env["HOROVOD_BUILD_ARCH_FLAGS"] = plan.arch_flags
    if plan.tools.compiler:
        env.setdefault("CXX", plan.tools.compiler)
    env["LDFLAGS"] = " ".join(filter(None, [environ.get("LDFLAGS"), "-s"]))  # no symbol tables in the extensions
    env[RPATH_VARIABLE] = ";".join(plan.search_folders)
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return env


def describe(plan: Plan) -> Sequence[str]:
    """The plan in lines for people."""
    return [
        f"Frameworks: {', '.join(map(str, plan.frameworks))}",
        f"MPI: {plan.mpi} ({plan.mpi.mpirun})",
        f"Compiler: {plan.tools.compiler_version or 'none'}, C++{plan.cxx_standard}, {plan.jobs} at a time",
        *(f"{note[0].upper()}{note[1:]}" for note in plan.gpu.notes),
    ]
