"""Names of the files in a run directory, and JSON in and out.

Commands talk through these files: ``train`` writes, others read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line that is still being written is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
