"""What an installed Horovod was built for: a JSON file inside its package, written at build time.

Reading it imports neither Horovod nor a framework and starts no process, so every command can afford it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "hvdtrain_build.json"

#: framework -> the distributions that provide it, the usual one first.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-intel",
        "tensorflow-rocm",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
    "mxnet": ("mxnet", "mxnet-cu112", "mxnet-cu110", "mxnet-cu102"),
}

#: framework -> its extension in Horovod's package, without the suffix.
EXTENSIONS = {"torch": "torch/mpi_lib_v2", "tensorflow": "tensorflow/mpi_lib", "mxnet": "mxnet/mpi_lib"}

#: framework -> its name in the metadata.json that Horovod's own build writes.
_UPSTREAM_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow", "mxnet": "mxnet"}


@dataclass(frozen=True)
class BuildInfo:
    """What Horovod was built for. ``ours`` is false for a Horovod that something else installed."""

    horovod: str
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """framework -> the version it was built for"""
    python: str = ""
    mpi: str = ""
    gloo: bool = True
    nccl: str = ""
    cuda: str = ""
    compiler: str = ""
    cxx_standard: int = 0
    changes: tuple[str, ...] = ()
    key: str = ""
    ours: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"frameworks": dict(self.frameworks)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BuildInfo:
        """Unknown keys are left out, so that a newer build's file can be read."""
        values: dict[str, Any] = json.loads(text)
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        return cls(**known | {"changes": tuple(known.get("changes", ()))})


def installed_version(framework: str, version_of: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """The version of the framework in this environment, from its metadata; None where it is not installed."""
    for name in DISTRIBUTIONS[framework]:
        try:
            return version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_frameworks() -> dict[str, str]:
    """framework -> version, of the frameworks that are installed in this environment."""
    found = {framework: installed_version(framework) for framework in DISTRIBUTIONS}
    return {framework: version for framework, version in found.items() if version is not None}


def package_folder() -> Path | None:
    """The folder of the installed ``horovod`` package, without importing it."""
    spec = importlib.util.find_spec("horovod")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def read_build_info(folder: Path) -> BuildInfo:
    """What the Horovod in ``folder`` was built for; from Horovod's own metadata.json where another tool built it."""
    ours = folder / FILE_NAME
    if ours.is_file():
        return BuildInfo.from_json(ours.read_text(encoding="utf-8"))
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    try:
        upstream = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        upstream = {}
    frameworks = {name: upstream[theirs] for name, theirs in _UPSTREAM_NAMES.items() if theirs in upstream}
    return BuildInfo(horovod=version, frameworks=frameworks, ours=False)


def has_extension(folder: Path, framework: str) -> bool:
    """Whether the package holds the framework's compiled extension."""
    stem = folder / EXTENSIONS[framework]
    return any(stem.parent.glob(f"{stem.name}*.so"))


def mismatch(info: BuildInfo, framework: str, installed: str | None) -> str:
    """Why this Horovod cannot serve the framework, in a few words; empty if it can."""
    built_for = info.frameworks.get(framework)
    if installed is None:
        return f"built for {framework} {built_for}, which is not installed" if built_for else f"{framework} is not installed"
    if built_for is None:
        return f"not built for {framework} {installed}"
    return "" if _same(built_for, installed) else f"built for {framework} {built_for}, but {installed} is installed"


def _same(built_for: str, installed: str) -> bool:
    """Equal versions; a local part (+cpu, +cu130) counts only where both have one, since some packagers drop it."""
    public_built, _, local_built = built_for.partition("+")
    public_installed, _, local_installed = installed.partition("+")
    return public_built == public_installed and (not local_built or not local_installed or local_built == local_installed)
