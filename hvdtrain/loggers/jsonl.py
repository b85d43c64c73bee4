"""One JSON line per logging step, flushed, for programs and for the run's report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.state import TrainState


class JsonLinesLogger:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, state: TrainState, values: Mapping[str, float]) -> None:
        line = {"time": time.time(), "step": state.step, "epoch": state.epoch, "samples": state.samples, **values}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()
