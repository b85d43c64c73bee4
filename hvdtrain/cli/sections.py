"""A command's options under headings in its help: ``--help`` of thirty options in one list is read by nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click


class SectionOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *arguments: Any, section: str, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.section = section


def section(title: str) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """``click.option`` for options under this heading."""
    return partial(click.option, cls=SectionOption, section=title)


class SectionCommand(click.Command):
    """Writes its options under their headings, in the order in which the headings are first used."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                title = parameter.section if isinstance(parameter, SectionOption) else "Other"
                found.setdefault(title, []).append(record)
        for title, records in found.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=26)
