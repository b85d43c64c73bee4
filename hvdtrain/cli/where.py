"""The options of ``hvdtrain run`` that other commands take too, since they start their jobs through it: where ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``hvdtrain run`` that say where ranks run; all others can be set for ``hvdtrain run`` in its own words."""
    for option in reversed(
        (
            click.option("-np", "--num-proc", "np", type=click.IntRange(1), metavar="N", help="Number of ranks."),
            click.option("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-16]:4."),
            click.option("--hostfile", metavar="FILE", help="Hosts and slots in a file; any dialect."),
            click.option("--launcher", metavar="NAME", help="What starts the ranks, as for hvdtrain run."),
            click.option("--gloo", is_flag=True, help="Let the ranks meet over Gloo instead of MPI."),
            click.option("--nic", multiple=True, metavar="NAME", help="Network interface to use on all hosts."),
            click.option("--oversubscribe", is_flag=True, help="Allow more ranks than slots."),
            click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Pass a variable to the ranks."),
        )
    ):
        function = option(function)
    return function


def words(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The options as ``hvdtrain run`` takes them."""
    found: list[str] = []
    for name, flag in (("np", "-np"), ("hosts", "-H"), ("hostfile", "--hostfile"), ("launcher", "--launcher")):
        if given[name] is not None:
            found += [flag, str(given[name])]
    for name in ("nic", "env"):
        for value in given[name]:
            found += [f"--{name}", value]
    return (*found, *(f"--{name}" for name in ("gloo", "oversubscribe") if given[name]))
