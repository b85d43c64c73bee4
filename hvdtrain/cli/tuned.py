"""What ``hvdtrain tune`` has stored for a job, as ``hvdtrain run`` uses it: over the defaults, under everything of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

from hvdtrain.cli import train_words
from hvdtrain.errors import UsageError
from hvdtrain.launch import Controller, Host


@dataclass(frozen=True)
class Overlay:
    """Variables of the ranks, with the reason for them; ``text`` is for people. All empty: nothing is stored."""

    variables: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    text: str = ""
    warning: str = ""


def look_up(
    context: click.Context,
    words: Sequence[str],
    hosts: Sequence[Host],
    controller: Controller,
    mpi: str,
    environ: Mapping[str, str],
) -> Overlay:
    """For ranks that are started as ``hvdtrain train WORDS``, without what ``words``, ``environ`` or their config file say."""
    from hvdtrain.config import TUNED  # it imports NumPy
    from hvdtrain.tune import space, store

    try:
        config = train_words.config(context, words, environ)
        found = store.read(store.key(config, hosts, controller, mpi).path(environ))
    except store.DamagedError as error:
        return Overlay(warning=f"{error.message} ({error.hint})")
    except (UsageError, click.UsageError):
        return Overlay()  # the ranks will say what is wrong
    if found is None or not found.settings:
        return Overlay()
    options = {name for name, origin in config.origins.items() if origin != "default"}
    settings = tuple(each for each in found.settings if not space.set_by_user(each[0], options, environ))
    if not settings:
        return Overlay()
    variables = space.variables_of(settings)
    if wishes := space.wishes_of(settings):
        variables[TUNED] = ",".join(f"{name}={value}" for name, value in wishes.items())
    # The ratio was measured with all of them together.
    reason = found.reason if settings == found.settings else f"tuned ({found.date})"
    return Overlay(variables, reason, f"{reason}: {space.text(settings)}; --no-tuned leaves it out")
