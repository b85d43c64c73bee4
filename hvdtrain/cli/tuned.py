"""What ``hvdtrain tune`` has stored for a job, as ``hvdtrain run`` uses it: over the defaults, under everything of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdtrain.launch import Controller, Host

if TYPE_CHECKING:
    from hvdtrain.config import Config


@dataclass(frozen=True)
class Overlay:
    """Variables of the ranks, with the reason for them; ``text`` is for people. All empty: nothing is stored."""

    variables: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    text: str = ""
    warning: str = ""
    #: attributes of ``Exchange`` that differ from the configuration's
    exchange: Mapping[str, Any] = field(default_factory=dict)


def look_up(config: Config, hosts: Sequence[Host], controller: Controller, mpi: str, environ: Mapping[str, str]) -> Overlay:
    """For ranks that train as ``config`` says, without what it or ``environ`` has of the user's."""
    from hvdtrain.config import TUNED  # it imports NumPy
    from hvdtrain.tune import space, store

    try:
        found = store.read(store.key(config, hosts, controller, mpi).path(environ))
    except store.DamagedError as error:
        return Overlay(warning=f"{error.message} ({error.hint})")
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
    names = {"exchange": "engine", "compression": "compression"}
    exchange = {names[name]: value for name, value in wishes.items() if name in names}
    return Overlay(variables, reason, f"{reason}: {space.text(settings)}; --no-tuned leaves it out", exchange=exchange)
