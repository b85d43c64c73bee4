"""One JSON line per logging step, flushed, for programs and for the run's report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from hvdtrain.state import TrainState

log = logging.getLogger(__name__)


class JsonLinesLogger:
    """Adds to what is there, as a resumed run does. A figure that is no number (NaN, infinite) is written as null.

    Args:
        step: where the run begins; what an earlier one logged beyond is dropped, as it is done again.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self._path, self._warned = path, False
        #: unbuffered: a line that cannot be written must not wait in a buffer for the next
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_part_of_line(path)
            if step is not None:
                _drop_after(path, step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._warn(error)

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        figures = {name: number if math.isfinite(number := float(value)) else None for name, value in values.items()}
        line = {
            "time": time.time() if at is None else at,
            "step": state.step,
            "epoch": state.epoch,
            "samples": state.samples,
            **figures,
        }
        try:
            self._write((json.dumps(line, allow_nan=False) + "\n").encode())
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._warn(error)

    def _write(self, line: bytes) -> None:
        """The whole line or nothing of it."""
        if self._file is None:
            return
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("%s cannot be written, lines will be missing there: %s", self._path, error.strerror or error)
        self._warned = True


def _drop_part_of_line(path: Path) -> None:
    """Cut off a last line that a killed run left unfinished: the next one would be glued to it."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _drop_after(path: Path, step: int) -> None:
    """Leave out the lines of later steps. A reader sees the old file or the new one."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step(line) <= step]
    if len(kept) < len(lines):
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text("".join(kept), encoding="utf-8")
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def _step(line: str) -> int:
    """A line that is not ours counts as one before all steps, and stays."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
