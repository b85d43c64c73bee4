"""Acts out a plan: fetch the source, change it, compile it; the result is a wheel."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.buildinfo import FILE_NAME as BUILD_INFO_FILE
from hvdtrain.horovod.cache import Cache, file_digest
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.patches import HOROVOD_VERSION, apply_changes
from hvdtrain.horovod.plan import Plan, build_environment
from hvdtrain.horovod.shell import stream

SOURCE_FILE = f"horovod-{HOROVOD_VERSION}.tar.gz"
#: Of the source distribution on PyPI; the changes are written for this text and no other.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

#: setuptools 81 dropped pkg_resources, and its later releases ``setup.py bdist_wheel`` details that Horovod's setup.py uses.
_BUILD_REQUIREMENTS = ("setuptools<81", "wheel", "packaging")
_CMAKE_REQUIREMENT = "cmake>=3.25,<5"

_PERCENT = re.compile(r"^\[\s*(\d+)%\]")


@dataclass(frozen=True)
class Progress:
    """How a build tells what it does: ``stage`` names a step, ``percent`` counts within it."""

    stage: Callable[[str], None]
    percent: Callable[[int], None]


def parse_percent(line: str) -> int | None:
    """The percentage at the beginning of a line of make's output under CMake."""
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


class Builder:
    """Builds one plan in a temporary folder, writing everything that is said to one log."""

    def __init__(
        self, plan: Plan, cache: Cache, environ: Mapping[str, str], path: str, log: IO[str], progress: Progress
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._environ = environ
        self._path = path
        self._log = log
        self._progress = progress

    def build(self, folder: Path) -> Path:
        """The built wheel, below ``folder``."""
        tools = folder / "tools"
        self._progress.stage("Getting the build tools")
        cmake = self._install_tools(tools)
        nccl_home = folder / "nccl"
        _make_links(nccl_home, self._plan.gpu.links)
        env = build_environment(
            self._plan, self._environ, path=self._path, tools_folder=tools, nccl_home=nccl_home, cmake=cmake
        )
        self._progress.stage("Getting Horovod's source")
        source = unpack(self._fetch_source(folder, env), folder)
        names = apply_changes(source, self._plan.source)
        (source / "horovod" / BUILD_INFO_FILE).write_text(self._plan.build_info().to_json(), encoding="utf-8")
        self._log.write(f"Changes to the source: {', '.join(names)}\n")
        self._progress.stage(f"Compiling Horovod {HOROVOD_VERSION} for {' and '.join(self._plan.names)}")
        wheels = folder / "wheels"
        self._run("Building Horovod", [sys.executable, "setup.py", "bdist_wheel", "-d", str(wheels)], env, source, percent=True)
        return next(wheels.glob("*.whl"))

    def _install_tools(self, folder: Path) -> str:
        """Build requirements into a folder of their own: the user's environment stays as it is. Returns the CMake to use."""
        cmake = self._plan.tools.usable_cmake
        requirements = [*_BUILD_REQUIREMENTS, *([] if cmake else [_CMAKE_REQUIREMENT])]
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--target", str(folder), *requirements]
        self._run("Getting the build tools", command, dict(self._environ), folder.parent)
        if cmake:
            return cmake
        return str(next((folder / "cmake" / "data" / "bin").glob("cmake"), folder / "bin" / "cmake"))

    def _fetch_source(self, folder: Path, env: Mapping[str, str]) -> Path:
        """The source distribution: from the cache, else from the package index through pip."""
        cached = self._cache.folder / "source" / SOURCE_FILE
        if cached.is_file() and file_digest(cached) == SOURCE_SHA256:
            return cached
        target = folder / "download"
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "horovod", "--dest", str(target), f"horovod=={HOROVOD_VERSION}"]
        self._run("Getting Horovod's source", command, env, folder)
        fetched = target / SOURCE_FILE
        if not fetched.is_file() or file_digest(fetched) != SOURCE_SHA256:
            message = f"the package index gave another {SOURCE_FILE} than PyPI's (SHA-256 {SOURCE_SHA256[:16]}...)"
            raise HvdtrainError(message, "check pip's index settings ('pip config list', PIP_INDEX_URL)")
        partial = self._cache.make("source") / f".{folder.name}-{SOURCE_FILE}"
        shutil.copyfile(fetched, partial)
        partial.replace(cached)
        return cached

    def _run(self, what: str, command: list[str], env: Mapping[str, str], cwd: Path, *, percent: bool = False) -> None:
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            value = parse_percent(line) if percent else None
            if value is not None:
                self._progress.percent(value)

        self._log.write(f"$ {' '.join(command)}\n")
        code = stream(command, env=env, cwd=cwd, log=self._log, on_line=on_line)
        if code != 0:
            diagnosis = first_error(lines)
            hint = f"{diagnosis.hint}\n      " if diagnosis.hint else ""
            raise HvdtrainError(f"{what} failed: {diagnosis.error}", f"{hint}The whole log is in {self._log.name}")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source distribution and return its top folder."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python 3.11 before 3.11.4, such as Debian 12's
            tar.extractall(folder)
    return folder / SOURCE_FILE.removesuffix(".tar.gz")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one build, which goes whatever happens."""
    return tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-", ignore_cleanup_errors=True)


def _make_links(home: Path, links: Mapping[str, str]) -> None:
    for name, target in links.items():
        link = home / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
