"""Writing checkpoints that are whole or not there, beside the training."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.adapters import Adapter
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import BEST, Content, resolve, sha256, size_of, step_of, steps
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState

log = logging.getLogger(__name__)

_PART = ".part-"
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
            with self._noting_errors(self._root):
                said, fill = content(), self._adapter.snapshot()
                self._thread = threading.Thread(target=self._write, args=(said, fill), name="checkpoint", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Collective. Until nothing is being written.

        Raises:
            HvdtrainError: it could not be written (on all ranks alike); the older checkpoints are untouched.
        """
        busy = True
        while busy:
            self._join(_PATIENCE_S)
            mine = (float(self._thread is not None), float(self.failed))
            busy, failed = map(bool, self._comm.allreduce(mine, name="checkpoint/written"))
        if failed:
            # Of whichever rank wrote: the primary of today may be another than the one that began to write.
            errors, self._error = self._comm.allgather(self._error, name="checkpoint/error"), None
            raise next(error for error in errors if error is not None).everywhere()

    def close(self) -> None:
        """Wait for this rank's write alone, however the run ends."""
        self._join(None)
        if self._error is not None:  # not raised: the run ends for another reason
            log.warning("%s", self._error.message)

    def _join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _write(self, content: Content, fill: Fill) -> None:
        with contextlib.suppress(OSError):  # the training goes first; less than this, and a busy host would never let it write
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        with self._noting_errors(self._root / _name(content.state)):
            write(self._root, content, fill, keep=self._keep)

    @contextlib.contextmanager
    def _noting_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except HvdtrainError as error:
            self._error = error
        except Exception as error:
            self._error = _not_written(path, error, 0)


def write(root: Path, content: Content, fill: Fill, *, keep: int) -> Path:
    """Write a checkpoint under ``root`` and remove all but the newest ``keep`` and the best; its path.

    Raises:
        HvdtrainError: it could not be written; the older checkpoints are untouched.
    """
    path = root / _name(content.state)
    part = root / f"{_PART}{path.name}"
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
        if path.exists():  # the same step saved again, after a resume from an older checkpoint
            _remove(path)
        os.rename(part, path)
        _fsync(root)
    except UsageError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except Exception as error:
        written = size_of(part)
        shutil.rmtree(part, ignore_errors=True)
        raise _not_written(path, error, written) from error
    if content.best is not None and content.best.step == content.state.step:
        _mark_best(path)
    _prune(root, content, keep)
    return path


def _name(of: TrainState | Best) -> str:
    return f"step-{of.step:08d}"


def _not_written(path: Path, error: Exception, written: int) -> HvdtrainError:
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    # A framework's writer may hide the operating system's error, so look at the disk as well.
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or (path.parent.is_dir() and free < max(written, 1 << 16)):
        message = f"the disk is full: the checkpoint {path} needs more than {written:,} bytes, {free:,} are free"
        hint = "free some space or lower --keep; the older checkpoints are whole, so --resume auto goes on from the last one"
    else:
        first = next(iter(str(error).splitlines()), "")
        message = f"the checkpoint {path} could not be written: {type(error).__name__}: {first}"
        permission = "check that the run directory may be written to; " if isinstance(error, OSError) else ""
        hint = f"{permission}older checkpoints are untouched"
    return HvdtrainError(message, hint)


def _mark_best(path: Path) -> None:
    """Point the link to ``path``. A file system may have no links: the mark is for people, the truth is in ``state.json``."""
    link = path.with_name(f"{_PART}{BEST}")
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, path.with_name(BEST))


def _prune(root: Path, content: Content, keep: int) -> None:
    """Remove all but the newest ``keep`` up to the step of ``content``, and the best.

    What lies beyond, damaged or not, must not push these out. The best is the one that is marked, and the one that the state
    tells of, where a file system has no links.
    """
    mark = root / BEST
    spared = {resolve(mark).name if mark.is_symlink() else "", _name(content.best) if content.best else ""}
    for path in sorted((path for path in steps(root) if step_of(path) <= content.state.step), key=step_of)[:-keep]:
        if path.name not in spared:
            _remove(path)
    for rest in root.glob(f"{_PART}*"):  # of a writer that was killed
        if rest.is_symlink():
            rest.unlink(missing_ok=True)
        else:
            shutil.rmtree(rest, ignore_errors=True)


def _remove(path: Path) -> None:
    """Take a checkpoint's name away first: a removal that is cut short must not leave half a checkpoint."""
    doomed = path.with_name(f"{_PART}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
