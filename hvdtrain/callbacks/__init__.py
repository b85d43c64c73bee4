"""Watchers of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.state import TrainState


class Callback:
    """Override what is of interest. A callback runs on every rank and must not communicate.

    A returned text is a reason to stop: it enters the next vote of the ranks, which all of them follow.
    """

    #: whether it makes no sense without validation data; a recipe without is then refused
    needs_evaluation = False

    def on_start(self, state: TrainState) -> None:
        """Before the first step; ``state`` is not at 0 in a resumed run."""

    def on_step_end(self, state: TrainState) -> str | None:
        """After each update."""
        return None

    def on_evaluate(self, state: TrainState, values: Mapping[str, float]) -> str | None:
        """After each evaluation, with the means over all ranks: the same numbers on every rank."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: plain values (numbers, texts, lists, dicts), the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave, before ``on_start``. Called on every rank, if there is something."""

    def on_end(self, state: TrainState) -> None:
        """After the last step."""
