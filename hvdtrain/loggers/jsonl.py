"""One JSON line per logging step, flushed, for programs and for the run's report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.state import TrainState


class JsonLinesLogger:
    """Adds to what is there, as a resumed run does. A figure that is no number (NaN, infinite) is written as null.

    Args:
        step: where the run begins; what an earlier one logged beyond is dropped, as it is done again.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_part_of_line(path)
        if step is not None:
            _drop_after(path, step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, state: TrainState, values: Mapping[str, float]) -> None:
        figures = {name: number if math.isfinite(number := float(value)) else None for name, value in values.items()}
        line = {"time": time.time(), "step": state.step, "epoch": state.epoch, "samples": state.samples, **figures}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


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
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, path)


def _step(line: str) -> int:
    """A line that is not ours counts as one before all steps, and stays."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
