"""Tables: on a terminal, or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .runs import Figures


@dataclass(frozen=True)
class Sheet:
    """Texts by row and column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, *, markdown: bool) -> None:
        if markdown:
            lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
            print(f"**{self.title}**\n", *(f"| {' | '.join(line)} |" for line in lines), "", sep="\n")
            return
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        Console(width=130).print(table)


def times(figures: Figures) -> tuple[str, str, str]:
    """Median step, fastest round, and the spread of the runs."""
    return (
        f"{figures.median * 1e3:.2f}",
        f"{figures.fastest * 1e3:.2f}",
        f"{figures.spread:.0%}" if figures.runs > 1 else "one run",
    )


def ratios(first: Figures, second: Figures) -> tuple[float, float]:
    """``first`` over ``second``: of the medians, and of the fastest rounds."""
    return first.median / second.median, first.fastest / second.fastest


def verdict(ratio: float, bar: float, noise: Sequence[Figures], *, at_least: bool = False) -> str:
    """Whether ``ratio`` keeps ``bar``; "within noise" where the runs of one side differ by more than what is missing."""
    missing = (bar - ratio if at_least else ratio - bar) / bar
    if missing <= 0:
        return "kept"
    return "missed, within noise" if missing <= max(figures.spread for figures in noise) else "missed"
