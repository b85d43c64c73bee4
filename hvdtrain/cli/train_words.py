"""The words that are meant for ``hvdtrain train``, read as it will read them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, is_here
from hvdtrain.launch.detect import own_names

if TYPE_CHECKING:
    from hvdtrain.config import Config


def command(context: click.Context) -> click.Command:
    """``hvdtrain train``, of the group that ``context`` belongs to."""
    group = context.find_root().command
    assert isinstance(group, click.Group)
    found = group.get_command(context, "train")
    assert found is not None
    return found


def config(context: click.Context, words: Sequence[str], environ: Mapping[str, str]) -> Config:
    """What ``hvdtrain train WORDS`` would train, on a rank with this environment.

    Raises:
        UsageError: it would refuse them.
        click.UsageError: the same, by Click.
    """
    from hvdtrain.config import resolve  # it imports NumPy, which takes longer than all else here

    given = dict(command(context).make_context("hvdtrain train", list(words)).params)
    recipe, file = given.pop("recipe"), given.pop("config")
    settings = dict(pair(text) for text in given.pop("settings"))
    return resolve(recipe, settings, given, environ, Path(file) if file is not None else None)


def judge(config: Config, hosts: Sequence[Host]) -> None:
    """Look at the values that ``hvdtrain train`` looks at only when it has the recipe, and that need none to be wrong.

    ``hosts`` are those of the job; the ranks may know them by other names.

    Raises:
        UsageError: one of them means nothing, or two exclude each other. Each rank would say so.
    """
    options = config.options
    given = {name for name, origin in config.origins.items() if origin != "default"}
    if given & {"compression", "compression_warmup"}:
        from hvdtrain.compression.choose import parse

        parse(options.compression, warmup=options.compression_warmup)
    if given & {"loader_workers", "prefetch"}:
        from hvdtrain.data.feed import Wanted

        Wanted.parse(options.loader_workers, options.prefetch)
    if options.keep_best is not None:
        from hvdtrain.checkpoint.best import Best

        Best.parse(options.keep_best)
    if options.share is not None:
        from hvdtrain.data.shares import host_shares

        names = [os.uname().nodename if is_here(host.name, own_names()) else host.name for host in hosts]
        host_shares(options.share, names, lenient=True)


def pair(text: str) -> tuple[str, str]:
    """The name and the value of a ``--set``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set takes NAME=VALUE, got {text!r}", f"--set {name or 'name'}=VALUE")
    return name.strip().replace("-", "_"), value
