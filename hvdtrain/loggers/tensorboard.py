"""TensorBoard event files.

Through tensorboardX: the tensorboard package's own writer imports TensorFlow wherever that is installed, for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.state import TrainState

_FLUSH_S = 5  # curves are looked at while the run goes on


class TensorBoardLogger:
    """Raises ``ImportError`` where the tensorboardX package is not installed."""

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), flush_secs=_FLUSH_S, write_to_disk=True)

    def log(self, state: TrainState, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=state.step)

    def close(self) -> None:
        self._writer.close()
