"""The best step of a run by a validation figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Best:
    """Which figure is watched, and its best value so far; a value of None has not been seen yet."""

    figure: str
    mode: str
    value: float | None = None
    step: int = 0

    @classmethod
    def parse(cls, text: str) -> Best:
        """``valid/accuracy:max`` or ``valid/loss:min``.

        Raises:
            UsageError: it is neither.
        """
        figure, _, mode = text.rpartition(":")
        if not figure or mode not in ("min", "max"):
            raise UsageError(
                f"--keep-best takes the name of a validation figure and min or max, got {text!r}",
                "for example --keep-best valid/loss:min or --keep-best valid/accuracy:max",
            )
        return cls(figure, mode)

    def after(self, step: int, values: Mapping[str, float]) -> Best:
        """The best after an evaluation that gave ``values`` at ``step``; of equal ones the first.

        Raises:
            UsageError: the evaluation gives no such figure.
        """
        if self.figure not in values:
            known = ", ".join(sorted(values)) or "none: the recipe has no validation data"
            raise UsageError(f"--keep-best watches {self.figure!r}, the evaluation gives {known}").everywhere()
        value = values[self.figure]
        better = math.isfinite(value) and (
            self.value is None or (value < self.value if self.mode == "min" else value > self.value)
        )
        return replace(self, value=value, step=step) if better else self

    def same_figure(self, other: Best | None) -> bool:
        return other is not None and (self.figure, self.mode) == (other.figure, other.mode)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Best:
        """Raises ``KeyError`` or ``TypeError`` on a foreign file."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})
