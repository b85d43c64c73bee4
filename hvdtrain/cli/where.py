"""The options of ``hvdtrain run`` that other commands take too, since they start their jobs through it: where ranks run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from hvdtrain.launch import Host, allocation, fit, hostfile, is_here, resources
from hvdtrain.launch.detect import own_names


def options(np: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of ``hvdtrain run`` that say where ranks run; all others can be set for ``hvdtrain run`` in its own words.

    ``np`` says what ``-np`` is, and by default: that differs with what needs how many ranks.
    """
    found = (
        click.option("-np", "--num-proc", "np", type=click.IntRange(1), metavar="N", help=np),
        click.option("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-16]:4.  [default: as hvdtrain run]"),
        click.option("--hostfile", metavar="FILE", help="Hosts and slots in a file; any dialect."),
        click.option("--launcher", metavar="NAME", help="What starts the ranks, as for hvdtrain run."),
        click.option("--gloo", is_flag=True, help="Let the ranks meet over Gloo instead of MPI."),
        click.option("--nic", multiple=True, metavar="NAME", help="Network interface to use on all hosts."),
        click.option("--oversubscribe", is_flag=True, help="Allow more ranks than slots."),
        click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Pass a variable to the ranks."),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(found):
            function = option(function)
        return function

    return decorate


def hosts(given: Mapping[str, Any]) -> tuple[Host, ...]:
    """As ``hvdtrain run`` uses them."""
    np = given["np"]
    listed = allocation.hosts(os.environ, given["hosts"], given["hostfile"])
    if listed is None:
        listed = hostfile.Hosts((Host("localhost", np or 1),), "this machine")
    count = sum(host.slots for host in listed.hosts) if np is None else np
    return fit(listed.hosts, count, source=listed.source, oversubscribe=given["oversubscribe"])


def warn_of_crowd(used: Sequence[Host]) -> None:
    """Tell what figures of ranks on this machine will suffer from, if any are here."""
    from hvdtrain.bench import crowd

    here = sum(host.slots for host in used if is_here(host.name, own_names()))
    if here:
        for sentence in crowd.warnings(here, resources.usable_cpus(resources.affinity()), crowd.busy()):
            click.secho(f"Warning: {sentence}", err=True, fg="yellow")


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
