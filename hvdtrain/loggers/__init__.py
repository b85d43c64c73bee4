"""Where figures go. The primary alone logs; what it logs is already the mean over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hvdtrain.state import TrainState


class Logger(Protocol):
    """Where it cannot write (a full disk), it warns once and goes without: the training is worth more than its curves."""

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        """Record the figures of one window of steps (``train/...``, ``speed/...``) or of one evaluation (``valid/...``).

        ``at``: the time (``time.time()``) that they are of; None: now.
        """

    def close(self) -> None:
        """Nothing more comes."""
