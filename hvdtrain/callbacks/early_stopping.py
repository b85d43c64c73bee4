"""Stop when a validation figure no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from hvdtrain.callbacks import Callback
from hvdtrain.errors import UsageError
from hvdtrain.state import TrainState


class EarlyStopping(Callback):
    """Stop after ``patience`` evaluations in a row in which ``monitor`` did not improve by more than ``min_delta``.

    All ranks see the same reduced figures, so all decide alike. A resumed run goes on counting; one that is made to go on
    after it was stopped waits for ``patience`` evaluations anew.
    """

    needs_evaluation = True

    def __init__(
        self, monitor: str = "valid/loss", *, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"EarlyStopping's mode must be 'min' or 'max', got {mode!r}")
        if patience < 1:
            raise UsageError(f"EarlyStopping's patience must be at least 1, got {patience}")
        self.monitor, self.patience, self.mode, self.min_delta = monitor, patience, mode, min_delta
        self.best = math.inf
        self.bad_evaluations = 0

    def on_evaluate(self, state: TrainState, values: Mapping[str, float]) -> str | None:
        if self.monitor not in values:
            known = ", ".join(sorted(values))
            raise UsageError(f"EarlyStopping watches {self.monitor!r}, the evaluation gives {known}").everywhere()
        loss = values[self.monitor] if self.mode == "min" else -values[self.monitor]
        if loss < self.best - self.min_delta:
            self.best, self.bad_evaluations = loss, 0
            return None
        self.bad_evaluations += 1
        if self.bad_evaluations < self.patience:
            return None
        return f"{self.monitor} has not improved in {self.bad_evaluations} evaluations"

    def state_dict(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {"monitor": self.monitor, "mode": self.mode, "best": best, "bad_evaluations": self.bad_evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["monitor"], state["mode"]) == (self.monitor, self.mode):
            waited = int(state["bad_evaluations"])
            self.best = math.inf if state["best"] is None else float(state["best"])
            self.bad_evaluations = waited if waited < self.patience else 0
