"""Checkpoints of the linear recipe, and ways to damage them."""

from __future__ import annotations

import shutil
from pathlib import Path

from hvdtrain.checkpoint.files import Content
from hvdtrain.checkpoint.writer import write
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.state import TrainState
from hvdtrain.world import World

COMM = LocalCommunicator(World())
DATA = {"samples": 1003, "seed": 5, "shuffle": True}


def save(root: Path, step: int, adapter, keep: int = 3, **more) -> Path:
    """A checkpoint of ``step`` whose weights are all ``step``."""
    adapter.weights[:] = step
    content = Content(state=TrainState(step=step, position=step * 64), data=DATA, **more)
    return write(root, content, adapter.snapshot(), keep=keep)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a byte flipped": lambda path: flip_a_byte(path / "model/model.npz"),
    "a file cut short": lambda path: (path / "model/model.npz").write_bytes((path / "model/model.npz").read_bytes()[:-1]),
    "a file missing": lambda path: (path / "model/model.npz").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"files": {'),
    "a foreign manifest": lambda path: (path / "manifest.json").write_text("[]"),
    "a state cut short": lambda path: (path / "state.json").write_text(""),
    "an empty directory": lambda path: [shutil.rmtree(path), path.mkdir()],
}
