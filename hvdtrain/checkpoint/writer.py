"""Writing checkpoints that are whole or not there, beside the training."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from hvdtrain.adapters import Adapter
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import BEST, Content, resolve, sha256, size_of, step_of, steps
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE
from hvdtrain.rundir import claimed_at
from hvdtrain.state import TrainState

log = logging.getLogger(__name__)

_PART = ".part-"
#: What file systems say that sync files, and no directories.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
#: Longest wait of a rank in one collective while the primary writes: well below what Horovod takes for a stalled rank.
_PATIENCE_S = 2.0

#: Of the thread that writes.
_NICE = 10

#: writes the adapter's files into an empty directory
Fill = Callable[[Path], None]


class Saver:
    """Saves checkpoints of one run. The training waits for a copy of the state in memory; a thread of the primary writes it.

    One write is under way at most: the next save waits for it. What goes wrong in a write is raised by all ranks in the next
    collective call here.
    """

    def __init__(self, root: Path, adapter: Adapter, comm: Communicator, *, keep: int) -> None:
        self._root, self._adapter, self._comm, self._keep = root, adapter, comm, keep
        self._thread: threading.Thread | None = None
        self._error: HvdtrainError | None = None

    def move(self, comm: Communicator) -> None:
        """The ranks are those of ``comm`` from now on. What this rank is writing, and what went wrong in it, stays its own."""
        self._comm = comm

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a write that went wrong."""
        return self._error is not None

    def save(self, content: Callable[[], Content]) -> None:
        """Collective. Copy the state and begin to write it. ``content`` is called on the primary.

        Raises:
            HvdtrainError: the save before this one went wrong (on all ranks alike).
        """
        self.wait()
        if self._comm.world.is_primary:
            try:
                said, fill = content(), self._adapter.snapshot()
            except HvdtrainError as error:
                self._error = error
            except OSError as error:
                self._error = _not_written(self._root / "step-...", error, 0)
            else:
                self._thread = threading.Thread(target=self._write, args=(said, fill), name="checkpoint", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Collective. Until nothing is being written.

        Raises:
            HvdtrainError: it could not be written (on all ranks alike); the older checkpoints are untouched.
        """
        busy = True
        while busy:
            mine = (float(self._is_writing(_PATIENCE_S)), float(self.failed))
            busy, failed = map(bool, self._comm.allreduce(mine, name="checkpoint/written"))
        if failed:
            # Of whichever rank wrote: the primary of today may be another than the one that began to write.
            errors, self._error = self._comm.allgather(self._error, name="checkpoint/error"), None
            raise next(error for error in errors if error is not None).everywhere()

    def close(self) -> None:
        """Wait for this rank's write alone, however the run ends."""
        if self._is_writing(0):
            phase = HERE.phase
            HERE.enter("writing the last checkpoint")
            while self._is_writing(_PATIENCE_S):
                HERE.moved()  # a slow disk is no rank that hangs
            HERE.enter(phase)
        if self._error is not None:  # not raised: the run ends for another reason
            log.warning("%s", self._error.message)

    def _is_writing(self, seconds: float) -> bool:
        """Whether the thread still writes after ``seconds`` at most."""
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is not None

    def _write(self, content: Content, fill: Fill) -> None:
        """In the thread. However it ends, either the checkpoint is written or there is an error."""
        path = self._root / _name(content.state)
        error: HvdtrainError | None = HvdtrainError(f"the checkpoint {path} could not be written", _UNTOUCHED)
        try:
            with contextlib.suppress(OSError):  # the training goes first; less, and a busy host would never let it write
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            write(self._root, content, fill, keep=self._keep)
            error = None
        except HvdtrainError as found:
            error = found
        finally:
            self._error = error


def write(root: Path, content: Content, fill: Fill, *, keep: int) -> Path:
    """Write a checkpoint under ``root`` and remove all but the newest ``keep`` and the best; its path.

    Raises:
        HvdtrainError: it could not be written; the older checkpoints are untouched.
    """
    path = root / _name(content.state)
    part = root / _part(path.name)
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / "model").mkdir(parents=True)
        fill(part / "model")
        _write_text(part / "state.json", json.dumps(content.to_json()))
        files = sorted(file for file in part.rglob("*") if file.is_file())
        manifest = {str(file.relative_to(part)): {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}
        for entry in part.rglob("*"):  # the directories too: they hold the names
            _fsync(entry)
        _write_text(part / "manifest.json", json.dumps({"files": manifest}, indent=1))
        _fsync(part)
        _give_name(part, path)
    except HvdtrainError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except Exception as error:
        written = size_of(part)
        shutil.rmtree(part, ignore_errors=True)
        raise _not_written(path, error, written) from error
    # The checkpoint is whole: what goes wrong from here on is no reason to end the run.
    if content.best is not None and content.best.step == content.state.step:
        _mark_best(path)
    _prune(root, content, keep)
    return path


def _part(name: str) -> str:
    """The name of something unfinished. A lost rank that still writes, and the one in its place, do not share it."""
    return f"{_PART}{name}{_ours()}"


def _ours() -> str:
    return f".{socket.gethostname()}.{os.getpid()}"


def _give_name(part: Path, path: Path) -> None:
    """``part`` becomes ``path``. One that has the name (the same step saved again) stays until the new one is there."""
    old = path.with_name(_part(f"old-{path.name}"))
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    try:
        os.rename(part, path)
    except OSError:
        if replaces:
            os.rename(old, path)
        raise
    _fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _name(of: TrainState | Best) -> str:
    return f"step-{of.step:08d}"


_UNTOUCHED = "older checkpoints are untouched"


def _not_written(path: Path, error: Exception, written: int) -> HvdtrainError:
    free = None
    with contextlib.suppress(OSError):  # a file system that is gone does not tell
        free = shutil.disk_usage(path.parent).free
    # A framework's writer may hide the operating system's error, so look at the disk as well.
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or (free is not None and free < max(written, 1 << 16)):
        needs = f"needs more than {written:,} bytes" if written else "cannot be begun"
        are_free = "" if free is None else f", {free:,} bytes are free"
        return HvdtrainError(
            f"the disk is full: the checkpoint {path} {needs}{are_free}",
            "free some space or lower --keep; the older checkpoints are whole, so --resume auto goes on from the last one",
        )
    if not isinstance(error, OSError):  # a defect: who is to mend it needs to know where
        log.error("writing the checkpoint %s failed", path, exc_info=error)
    first = next(iter(str(error).splitlines()), "")
    permission = "check that the run directory may be written to; " if isinstance(error, OSError) else ""
    return HvdtrainError(
        f"the checkpoint {path} could not be written: {type(error).__name__}: {first}", f"{permission}{_UNTOUCHED}"
    )


def _mark_best(path: Path) -> None:
    """Point the link to ``path``. A file system may have no links: the mark is for people, the truth is in ``state.json``."""
    link = path.with_name(_part(BEST))
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, path.with_name(BEST))
    except OSError as error:
        log.warning("%s cannot be made the link to %s: %s", path.with_name(BEST), path.name, error.strerror or error)


def _prune(root: Path, content: Content, keep: int) -> None:
    """Remove all but the newest ``keep`` up to the step of ``content``, and the best; what cannot be removed is warned of.

    What lies beyond, damaged or not, must not push these out. The best is the one that is marked, and the one that the state
    tells of, where a file system has no links.
    """
    try:
        mark = root / BEST
        spared = {resolve(mark).name if mark.is_symlink() else "", _name(content.best) if content.best else ""}
        known = sorted((path for path in steps(root) if step_of(path) <= content.state.step), key=step_of)
        for path in known[:-keep]:
            if path.name not in spared:
                _remove(path)
        claimed = claimed_at(root.parent)
        for rest in root.glob(f"{_PART}*"):
            _remove_rest(rest, claimed)
    except (OSError, HvdtrainError) as error:
        log.warning("the older checkpoints in %s cannot be looked at: %s", root, _reason(error))


def _remove(path: Path) -> None:
    """Take a checkpoint's name away first: a removal that is cut short must not leave half a checkpoint."""
    doomed = path.with_name(_part(f"old-{path.name}"))
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.rename(path, doomed)
    except OSError as error:
        log.warning("the older checkpoint %s cannot be removed: %s", path, _reason(error))
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_rest(rest: Path, claimed: float | None) -> None:
    """Remove what a writer left that was killed before the run directory was ``claimed``; a later one may still write."""
    with contextlib.suppress(OSError):
        if claimed is not None and rest.lstat().st_mtime >= claimed and not rest.name.endswith(_ours()):
            return
        if rest.is_symlink():
            rest.unlink()
        else:
            shutil.rmtree(rest)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_SYNC):
            raise
    finally:
        os.close(handle)
