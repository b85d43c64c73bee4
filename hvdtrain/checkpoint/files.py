"""What a checkpoint is, and whether one is whole. Needs no framework.

``checkpoints/step-00001200/`` holds ``state.json``, ``model/`` (the adapter's own files) and ``manifest.json`` with the
size and SHA-256 of each file. The manifest is written last, into a directory that only then gets its name: a directory
without a manifest is no checkpoint. ``checkpoints/best`` is a link to the best one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.best import Best
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState

log = logging.getLogger(__name__)

#: of ``state.json``; a change that older readers would misunderstand raises it
FORMAT = 1
BEST = "best"
#: where a file is missing, or stands in the place of a directory
_GONE = (FileNotFoundError, NotADirectoryError)
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Content:
    """What ``state.json`` says."""

    state: TrainState
    #: what the run said of its data: number of samples, seed, whether they are shuffled
    data: Mapping[str, Any]
    #: the recipe's parameters
    settings: Mapping[str, Any] = field(default_factory=dict)
    framework: str = ""
    #: figures of the evaluation at this very step, if there was one
    valid: Mapping[str, float] = field(default_factory=dict)
    #: the best step so far, which may be this one
    best: Best | None = None
    #: class name and state of each callback
    callbacks: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    #: why a callback ended the run here
    stopped: str = ""
    #: seconds since 1970
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        figures = {name: value if math.isfinite(value) else None for name, value in self.valid.items()}
        return {"format": FORMAT, **asdict(self), "valid": figures}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Content:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` on a foreign file."""
        plain = {name: values[name] for name in cls.__dataclass_fields__}
        plain["state"] = TrainState.from_json(plain["state"])
        plain["valid"] = {name: math.nan if value is None else float(value) for name, value in plain["valid"].items()}
        plain["best"] = None if plain["best"] is None else Best.from_json(plain["best"])
        plain["callbacks"] = tuple((str(name), dict(state)) for name, state in plain["callbacks"])
        return cls(**plain)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and what it says of itself."""

    path: Path
    content: Content

    @property
    def state(self) -> TrainState:
        return self.content.state

    @property
    def model(self) -> Path:
        """The adapter's files."""
        return self.path / "model"


class DamagedError(Exception):
    """A directory that looks like a checkpoint and is not a whole one; the text says why."""


def check(path: Path, *, sums: bool = True) -> Checkpoint:
    """Look whether the checkpoint at ``path`` is whole; without ``sums`` only whether all files have their sizes.

    Raises:
        DamagedError: it is not.
        HvdtrainError: it cannot be read now, or has another format than this version knows.
    """
    for fault in faults(path, sums=sums):
        raise DamagedError(fault)
    try:
        with reading(path / "state.json"):
            content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        version = int(content["format"])
        if version != FORMAT:
            raise UsageError(
                f"{path} has format {version}, this version of hvdtrain reads format {FORMAT}",
                "use the version of hvdtrain that wrote it" + (", or a newer one" if version > FORMAT else ""),
            )
        return Checkpoint(path, Content.from_json(content))
    except (*_GONE, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"state.json cannot be read: {_text(error)}") from None


def faults(path: Path, *, sums: bool = True) -> Iterator[str]:
    """What is wrong with the files of a checkpoint, by the name of the file.

    Raises:
        HvdtrainError: a file cannot be read now.
    """
    try:
        with reading(path / "manifest.json"):
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except _GONE:
        yield "manifest.json is missing"
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"manifest.json cannot be read: {_text(error)}"
        return
    for name in ("state.json", *expected):
        if name not in expected:
            yield f"{name} is not in the manifest"
            continue
        size, digest = expected[name]
        try:
            with reading(path / name):
                found = (path / name).stat().st_size
                is_other = found == size and sums and sha256(path / name) != digest
            if found != size:
                yield f"{name} has {found:,} bytes instead of {size:,}"
            elif is_other:
                yield f"{name} has another SHA-256 than its manifest says"
        except _GONE:
            yield f"{name} is missing"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the file system refuses for now is no damage: passing over a good checkpoint would lose what was trained."""
    try:
        yield
    except _GONE:
        raise
    except OSError as error:
        raise HvdtrainError(
            f"{path} cannot be read: {error.strerror or error}",
            "look after the file system and try again, or begin anew: --resume never --run-dir NEW",
        ) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the one checkpoint at ``path``.

    Raises:
        HvdtrainError: it is damaged; the hint names a whole one beside it. Or it cannot be read, or has another format.
    """
    path = resolve(path)
    try:
        return check(path)
    except DamagedError as error:
        other = None
        with contextlib.suppress(HvdtrainError):
            other = latest(path.parent)
        hint = f"{other.path} is whole" if other else "there is no whole checkpoint beside it"
        raise UsageError(f"{path} is no whole checkpoint: {error}", hint) from None


def find(where: Path) -> Checkpoint | None:
    """The checkpoint that ``where`` names: itself, or the newest whole one of a run or its ``checkpoints``.

    Raises:
        HvdtrainError: the one named is damaged; or one cannot be read, or has another format.
    """
    return open_checkpoint(where) if is_checkpoint(where) else latest(root_of(where))


def latest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint under ``root``; what is damaged is passed over with a warning.

    Raises:
        HvdtrainError: one cannot be read now, or has another format.
    """
    for path in sorted(steps(root), key=step_of, reverse=True):
        try:
            return check(path)
        except DamagedError as error:
            log.warning("%s is damaged (%s); looking for one before it", path, error)
    return None


def root_of(where: Path) -> Path:
    """The directory of checkpoints of a run, or ``where`` itself.

    Raises:
        HvdtrainError: it cannot be read.
    """
    with reading(where):
        return where / "checkpoints" if (where / "checkpoints").is_dir() else where


def is_checkpoint(path: Path) -> bool:
    """Whether the name is that of a checkpoint, whole or not, or of the link to the best one."""
    return _NAME.fullmatch(path.name) is not None or (path.name == BEST and path.is_symlink())


def resolve(path: Path) -> Path:
    """The checkpoint itself where ``path`` is the link to the best one."""
    return path.with_name(path.readlink().name) if path.is_symlink() else path


def steps(root: Path) -> list[Path]:
    """What looks like a checkpoint under ``root``.

    Raises:
        HvdtrainError: ``root`` cannot be read.
    """
    try:
        with reading(root):
            return [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    except _GONE:
        return []


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def size_of(path: Path) -> int:
    """Bytes of all files of a checkpoint, as far as they can be seen: it may be removed at the same time."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
