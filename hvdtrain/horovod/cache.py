"""The user's cache of built wheels: one folder per key, checked when taken, written atomically, locked while in use.

$XDG_CACHE_HOME/hvdtrain/horovod/            (~/.cache where XDG_CACHE_HOME is not set)
    source/horovod-0.28.1.tar.gz
    wheels/<key>/horovod-...whl  record.json (name, size, SHA-256; and what the key was made of, for people)
    logs/  locks/
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError

_RECORD = "record.json"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Horovod's wheels are cached."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(environ.get("HOME") or Path.home(), ".cache")
    return root / "hvdtrain" / "horovod"


def cache_key(parts: Mapping[str, object]) -> str:
    """A key of everything that matters to a build: equal parts in any order give equal keys."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Cache:
    """The cache below one folder."""

    folder: Path

    def find(self, key: str) -> Path | None:
        """The wheel of this key; None if there is none. A damaged one is removed, so that it is built again."""
        entry = self.folder / "wheels" / key
        if not entry.is_dir():
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
            wheel = entry / str(record["wheel"])
            if wheel.stat().st_size == record["size"] and file_digest(wheel) == record["sha256"]:
                return wheel
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def has_entry(self, key: str) -> bool:
        """Whether something is there under this key, sound or not."""
        return (self.folder / "wheels" / key).is_dir()

    def store(self, key: str, wheel: Path, parts: Mapping[str, object]) -> Path:
        """Put a wheel under its key: complete or not at all."""
        wheels = self.make("wheels")
        entry = wheels / key
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=wheels))
        try:
            copy = Path(shutil.copy2(wheel, partial))
            record = {"wheel": copy.name, "size": copy.stat().st_size, "sha256": file_digest(copy), "built_for": parts}
            (partial / _RECORD).write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
            for path in partial.iterdir():
                _sync(path)
            shutil.rmtree(entry, ignore_errors=True)
            partial.rename(entry)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return entry / wheel.name

    def make(self, name: str) -> Path:
        """A folder of the cache, made if need be."""
        folder = self.folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"the cache folder {folder} cannot be made: {error.strerror or error}"
            raise HvdtrainError(message, "set XDG_CACHE_HOME to a folder that you may write to") from error
        return folder

    def clear(self) -> int:
        """Remove everything but the locks; returns how many bytes went."""
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) if self.folder.is_dir() else 0
        for name in ("wheels", "source", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return size


@contextmanager
def lock(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes; it goes with its holder, however that ends. ``on_wait`` gets the holder's process id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            on_wait(file.read().strip() or "unknown")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.seek(0)
            file.truncate()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
