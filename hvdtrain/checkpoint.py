"""Checkpoints that are whole or not there, and one decision of all ranks about which to resume.

``checkpoints/step-00001200/`` holds ``state.json``, ``model/`` (the adapter's own files) and ``manifest.json`` with the
size and SHA-256 of each file. The manifest is written last, into a directory that only then gets its name: a directory
without a manifest is no checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.comm import Communicator, agree
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_PART = ".part-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were checked against its manifest."""

    path: Path
    state: TrainState
    #: what the run that wrote it said of its data: number of samples, seed, whether they are shuffled
    data: dict[str, Any]


class DamagedError(Exception):
    """A directory that looks like a checkpoint and is not a whole one; the text says why."""


def save(root: Path, state: TrainState, data: dict[str, Any], adapter: Adapter, comm: Communicator, *, keep: int) -> Path:
    """Collective. Write a checkpoint of ``state`` under ``root`` and remove all but the newest ``keep``.

    Raises:
        HvdtrainError: it could not be written (on every rank alike); the older checkpoints are untouched.
    """
    return agree(comm, lambda: _write(root, state, data, adapter, keep), name="checkpoint/save")


def resume(where: Path, adapter: Adapter, comm: Communicator, *, required: bool = False) -> Checkpoint | None:
    """Collective. Load the newest whole checkpoint at ``where`` on every rank: a run, its ``checkpoints``, or one of them.

    The primary alone looks at the file system and reads; the others get its choice and its state. Damaged checkpoints
    are passed over with a warning.

    Returns:
        the checkpoint, or None where there is none.

    Raises:
        HvdtrainError: there is none and one is ``required``, the one named is damaged, or it does not fit the recipe.
    """

    def read() -> Checkpoint | None:
        root = where / "checkpoints" if (where / "checkpoints").is_dir() else where
        chosen = open_checkpoint(where) if _is_checkpoint(where) else latest(root)
        if chosen is None and required:
            found = "has no whole checkpoint" if where.exists() else "does not exist"
            raise UsageError(f"cannot resume: {where} {found}", "give a run directory, or a checkpoint in it (step-...)")
        if chosen is not None:
            try:
                adapter.load(chosen.path / "model")
            except Exception as error:
                raise HvdtrainError(
                    f"{chosen.path} does not fit this recipe: {type(error).__name__}: {_lines(error)}",
                    "train the recipe it was saved by, or start anew: --resume never --run-dir NEW",
                ) from error
        return chosen

    chosen = agree(comm, read, name="checkpoint/resume")
    if chosen is not None:
        adapter.sync()
    return chosen


def refuse_old(root: Path, comm: Communicator) -> None:
    """Collective. Raise UsageError if ``root`` holds checkpoints: a run that starts anew would mix with them and prune them."""

    def look() -> None:
        if old := _steps(root):
            raise UsageError(
                f"{root} holds the checkpoints of an earlier run (up to {max(old, key=_step).name}), and --resume is never",
                "use another --run-dir, go on with --resume auto, or remove them",
            )

    agree(comm, look, name="checkpoint/none")


def refuse_newer(root: Path, step: int, comm: Communicator) -> None:
    """Collective. Raise UsageError if ``root`` holds a whole checkpoint after ``step``: the next run would resume that one."""

    def look() -> None:
        newest = latest(root)
        if newest is not None and newest.state.step > step:
            raise UsageError(
                f"{root} holds {newest.path.name}, which is newer than the checkpoint to resume (step {step})",
                "use another --run-dir, or remove the newer checkpoints",
            )

    agree(comm, look, name="checkpoint/newer")


def latest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint under ``root``; what is damaged is passed over with a warning."""
    for path in sorted(_steps(root), key=_step, reverse=True):
        try:
            return _check(path)
        except DamagedError as error:
            log.warning("%s is damaged (%s); falling back to the one before it", path, error)
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the one checkpoint at ``path``.

    Raises:
        UsageError: it is damaged; the hint names a whole one beside it.
    """
    try:
        return _check(path)
    except DamagedError as error:
        other = latest(path.parent)
        hint = f"--resume {other.path} is whole" if other else "there is no whole checkpoint beside it"
        raise UsageError(f"{path} is no whole checkpoint: {error}", hint) from None


def _write(root: Path, state: TrainState, data: dict[str, Any], adapter: Adapter, keep: int) -> Path:
    path = root / f"step-{state.step:08d}"
    part = root / f"{_PART}{path.name}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / "model").mkdir(parents=True)
        adapter.save(part / "model")
        _write_text(part / "state.json", json.dumps({"state": state.to_json(), "data": data}))
        files = sorted(file for file in part.rglob("*") if file.is_file())
        manifest = {str(file.relative_to(part)): {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files}
        for entry in part.rglob("*"):  # the directories too: they hold the names
            _fsync(entry)
        _write_text(part / "manifest.json", json.dumps({"files": manifest}, indent=1))
        _fsync(part)
        if path.exists():  # the same step saved again, after a resume from an older checkpoint
            _remove(path)
        os.rename(part, path)
        _fsync(root)
    except UsageError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except Exception as error:
        size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        shutil.rmtree(part, ignore_errors=True)
        raise _not_written(path, error, size) from error
    _prune(root, state.step, keep)
    return path


def _not_written(path: Path, error: Exception, written: int) -> HvdtrainError:
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    # A framework's writer may hide the operating system's error, so look at the disk as well.
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or (path.parent.is_dir() and free < max(written, 1 << 16)):
        message = f"the disk is full: the checkpoint {path} needs more than {written:,} bytes, {free:,} are free"
        hint = "free some space or lower --keep; the older checkpoints are whole, so --resume auto goes on from the last one"
    else:
        message = f"the checkpoint {path} could not be written: {type(error).__name__}: {_first_line(error)}"
        permission = "check that the run directory may be written to; " if isinstance(error, OSError) else ""
        hint = f"{permission}older checkpoints are untouched"
    return HvdtrainError(message, hint)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` up to ``step``. What lies beyond, damaged or not, must not push these out."""
    for path in sorted((path for path in _steps(root) if _step(path) <= step), key=_step)[:-keep]:
        _remove(path)
    for rest in root.glob(f"{_PART}*"):  # of a writer that was killed
        shutil.rmtree(rest, ignore_errors=True)


def _remove(path: Path) -> None:
    """Take a checkpoint's name away first: a removal that is cut short must not leave half a checkpoint."""
    doomed = path.with_name(f"{_PART}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _check(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
        for name, expected in manifest.items():
            file = path / name
            if file.stat().st_size != expected["size"]:
                raise DamagedError(f"{name} has {file.stat().st_size:,} bytes instead of {expected['size']:,}")
            if _sha256(file) != expected["sha256"]:
                raise DamagedError(f"{name} has another SHA-256 than its manifest says")
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(path, TrainState.from_json(content["state"]), dict(content["data"]))
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).relative_to(path)} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{type(error).__name__}: {_first_line(error)}") from None


def _is_checkpoint(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _steps(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and _is_checkpoint(path)] if root.is_dir() else []


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lines(error: Exception, most: int = 4) -> str:
    """The first lines of a message in one: PyTorch says what is wrong from the second line on."""
    return " ".join(line.strip() for line in str(error).splitlines()[:most])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
