"""Names of the files in a run directory, and JSON in and out.

Commands talk through these files: ``train`` writes, others read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import HvdtrainError, UsageError

_LOCK = ".lock"


@dataclass(frozen=True)
class RunDir:
    """The layout of one run's directory."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def error_json(self, rank: int) -> Path:
        return self.errors / f"rank-{rank}.json"

    def claim(self) -> IO[str]:
        """Make the directory and hold it: one job writes there at a time. Keep the result open as long as the job goes on.

        Raises:
            UsageError: another process holds it, or it cannot be written to.
        """
        return _claim(self.path, "run directory", "--run-dir")

    def check_free(self) -> None:
        """Look whether a job holds the directory, without taking or making anything.

        Raises:
            UsageError: one does.
        """
        with (
            contextlib.suppress(OSError),
            (self.path / _LOCK).open(encoding="utf-8") as lock,
        ):  # no lock there, or no locks at all
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(self.path, lock, "run directory", "--run-dir") from None


@contextlib.contextmanager
def held(folder: Path, what: str, option: str) -> Iterator[None]:
    """Hold a folder as ``RunDir.claim`` does, while this is open. One that holds nothing else afterwards is removed."""
    with _claim(folder, what, option):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [_LOCK]:
                    (folder / _LOCK).unlink()
                    folder.rmdir()


def remove_empty(path: Path) -> None:
    """Leave no empty directory behind a job that did not begin."""
    with contextlib.suppress(OSError):
        path.rmdir()


def claimed_at(folder: Path) -> float | None:
    """When the folder was last claimed, by the file system's clock; None if it never was."""
    try:
        return (folder / _LOCK).stat().st_mtime
    except OSError:
        return None


def _claim(folder: Path, what: str, option: str) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the {what} {folder} cannot be written to: {error.strerror}", f"give another one: {option} DIR"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            raise _in_use(folder, lock, what, option) from None
    except OSError:
        pass  # a file system without locks: go on without
    with contextlib.suppress(OSError):  # a full disk is told where something is lost by it
        lock.truncate(0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())  # nothing is left for its close
    return lock


def _in_use(folder: Path, lock: IO[str], what: str, option: str) -> UsageError:
    lock.seek(0)
    owner = lock.read().strip() or "another job"
    return UsageError(
        f"the {what} {folder} is in use by {owner}", f"wait for that job to end, or give another one: {option} DIR"
    )


def default_name(recipe: str) -> Path:
    """``runs/NAME-TIME`` of a recipe given as FILE.py[:function] or package.module:function; one that does not exist yet."""
    place, _, name = recipe.partition(":")
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    label = f"{stem}-{name}" if name and name != "recipe" else stem
    first = Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(path for path in chain([first], (first.with_name(f"{first.name}-{n}") for n in count(2))) if not path.exists())


def create(recipe: str) -> Path:
    """Make the directory of ``default_name``; two jobs that begin in the same second get two.

    Raises:
        UsageError: it cannot be made.
    """
    while True:
        path = default_name(recipe)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError as error:
            if not path.exists():  # not the name, but something above it
                raise UsageError(f"{path} cannot be made: {error.strerror}", "give another directory: --run-dir DIR") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be made: {error.strerror}", "give another directory: --run-dir DIR") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` so that a reader sees the old file or the new one, never a part.

    Raises:
        HvdtrainError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise HvdtrainError(f"{path} cannot be written: {error.strerror}", "make room, or use another --run-dir") from error


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line that is still being written is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
