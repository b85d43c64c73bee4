"""Numbers of options that Click's own ranges let through."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """``nan`` is in every range, and ``inf`` in those without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number of seconds", param, ctx)
