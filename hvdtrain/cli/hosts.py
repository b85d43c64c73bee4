"""``hvdtrain hosts``: look at a list of hosts, check it, write it in another dialect. Only ``check --connect`` goes to a host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hvdtrain.errors import UsageError
from hvdtrain.launch import (
    Host,
    Ssh,
    allocation,
    dialects,
    filters,
    fit,
    hostfile,
    is_this_machine,
    place,
    probe,
    resources,
    start_argv,
)
from hvdtrain.launch.hostfile import HostfileError, Hosts


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which hosts are meant; the same for all commands here."""
    for decorate in (
        click.option(
            "--exclude", multiple=True, metavar="HOST[:SLOTS]", help="Leave hosts or slots out: node3 or node3:0,2-3."
        ),
        click.option("--include", multiple=True, metavar="HOST[:SLOTS]", help="Use these only; may be repeated."),
        click.option("-H", "--hosts", metavar="LIST", help="Hosts on the command line: node1:2,node[2-4]:4."),
        click.argument("path", required=False, metavar="[HOSTFILE]"),
    ):
        function = decorate(function)
    return function


@click.group(short_help="Show, check and convert lists of hosts.")
def command() -> None:
    """Show, check and convert lists of hosts, in any dialect.

    Without HOSTFILE and -H, the hosts are those of the batch job (Slurm, PBS, LSF) that this shell runs in.
    """


@command.command()
@source_options
@click.option("-np", "--num-proc", "np", type=int, metavar="N", help="Number of ranks.  [default: all slots]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def show(
    path: str | None, hosts: str | None, include: tuple[str, ...], exclude: tuple[str, ...], np: int | None, as_json: bool
) -> int:
    """Show which rank goes where: rank, host, local rank, device."""
    listed = _listed(path, hosts)
    used = filters.apply(listed.hosts, include, exclude)
    count = sum(host.slots for host in used) if np is None else np
    rows = _rows(fit(used, count, source=listed.source))
    if as_json:
        click.echo(json.dumps({"source": listed.source, "warnings": list(listed.warnings), "ranks": rows}, indent=2))
        return 0
    _warn(listed)
    table = Table(title=f"{count} ranks on {len({row['host'] for row in rows})} hosts ({listed.source})", title_justify="left")
    for heading in ("rank", "host", "local rank", "node", "cross rank", "device"):
        table.add_column(heading, justify="left" if heading == "host" else "right")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("rank", "host", "local_rank", "node_rank", "cross_rank", "device")))
    Console(soft_wrap=True).print(table)
    return 0


def _rows(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """A row for each rank. UsageError if ranks on this machine would share a GPU."""
    here = resources.gpus(os.environ)
    rows = []
    for slot in place(hosts):
        device = str(slot.host.devices[slot.local_rank] if slot.host.devices else slot.local_rank)
        if is_this_machine(slot.host.name):
            if here and not slot.host.devices and slot.local_size > len(here):
                raise UsageError(
                    f"{slot.local_size} ranks on {slot.host.name}, which offers {len(here)} GPUs ({', '.join(here)})",
                    "lower its slots, or run with --share-devices",
                )
            device = (device if slot.host.devices else here[slot.local_rank]) if here else "cpu"
        rows.append(
            {
                "rank": slot.rank,
                "host": slot.host.name,
                "local_rank": slot.local_rank,
                "local_size": slot.local_size,
                "node_rank": slot.node_rank,
                "cross_rank": slot.cross_rank,
                "device": device,
            }
        )
    return rows


@command.command()
@source_options
@click.option("--strict", is_flag=True, help="A host without slots is a mistake, too.")
@click.option("--connect", is_flag=True, help="Also ask every host over ssh whether it can take part in a job started here.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="ssh port of all hosts.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def check(
    path: str | None,
    hosts: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    strict: bool,
    connect: bool,
    ssh_port: int | None,
    as_json: bool,
) -> int:
    """Check a list of hosts: all mistakes with line, text and the accepted form. Exit code 1 if there are any."""
    kept: tuple[Host, ...] = ()
    mistakes: list[dict[str, Any]] = []
    warnings: list[str] = []
    try:
        listed = _listed(path, hosts, strict=strict)
        kept, warnings = filters.apply(listed.hosts, include, exclude), list(listed.warnings)
    except HostfileError as error:
        mistakes = [
            {"where": each.where, "line": each.line, "text": each.text, "problem": each.problem, "hint": each.hint}
            for each in error.mistakes
        ]
    asked: dict[str, Any] = {}
    if connect and kept:
        asked, bad, different = _ask(kept, ssh_port)
        mistakes += [{"where": each.host, "line": 0, "text": "", "problem": each.problem, "hint": each.hint} for each in bad]
        warnings += different
    if as_json:
        report = {"hosts": len(kept), "slots": sum(host.slots for host in kept), "mistakes": mistakes, "warnings": warnings}
        click.echo(json.dumps({**report, **({"answers": asked} if connect else {})}, indent=2))
        return 1 if mistakes else 0
    for name, record in asked.items():
        gpus = f", {len(record['gpus'])} GPUs" if record["gpus"] else ""
        click.echo(f"{name}: Python {record['python']}, {record['cpus']} CPUs{gpus}, {', '.join(record['networks'])}")
    for each in mistakes:
        click.echo(f"{each['where']}: {each['problem']}")
        if each["text"] and each["text"] not in each["problem"]:
            click.echo(f"    {each['text']}")
        click.echo(f"    Hint: {each['hint']}")
    for warning in warnings:
        click.echo(f"warning: {warning}")
    count = f"{len(kept)} hosts, {sum(host.slots for host in kept)} slots"
    click.echo(f"{len(mistakes)} mistake{'' if len(mistakes) == 1 else 's'}" if mistakes else f"fine: {count}")
    return 1 if mistakes else 0


def _ask(hosts: Sequence[Host], ssh_port: int | None) -> tuple[dict[str, Any], list[probe.Answer], list[str]]:
    """What the hosts say, which cannot take part, and what differs. Each is asked twice, since a launcher connects twice."""
    ssh, start, cwd = Ssh(ssh_port), start_argv(sys.executable), os.getcwd()
    first = probe.ask(hosts, ssh, start, cwd)
    bad = probe.problems(first, cwd)
    again = probe.ask(hosts, ssh, start, cwd) if not bad else first
    told = {
        answer.host: {
            **{key: answer.record[key] for key in ("python", "cpus", "gpus")},
            "networks": [f"{each.name} {' '.join(each.addresses)}" for each in answer.interfaces if not each.why_not()],
        }
        for answer in first
        if answer.record
    }
    return told, bad + probe.second(first, again), probe.differences(first)


_DIALECTS = "\n".join(f"  {name:<10} {dialect.about}" for name, dialect in dialects.DIALECTS.items())


@command.command(epilog=f"\b\nDialects:\n{_DIALECTS}")
@source_options
@click.option("--to", "dialect", type=click.Choice(list(dialects.DIALECTS)), metavar="DIALECT", required=True)
def convert(path: str | None, hosts: str | None, include: tuple[str, ...], exclude: tuple[str, ...], dialect: str) -> int:
    """Write a list of hosts in another dialect, to standard output."""
    listed = _listed(path, hosts)
    _warn(listed)
    click.echo(dialects.render(filters.apply(listed.hosts, include, exclude), dialect), nl=False)
    return 0


def _listed(path: str | None, hosts: str | None, *, strict: bool = False) -> Hosts:
    if path is not None and hosts is not None:
        raise UsageError("both a hostfile and -H are given", "give one of them")
    if path is not None:
        return hostfile.read(path, strict=strict)
    if hosts is not None:
        return hostfile.parse_option(hosts, strict=strict)
    found = allocation.from_environment(os.environ)
    if found is None:
        raise UsageError(
            "no hosts: no hostfile, no -H, and this shell is in no Slurm, PBS or LSF job", "hvdtrain hosts show HOSTFILE"
        )
    return found


def _warn(listed: Hosts) -> None:
    for warning in listed.warnings:
        click.secho(f"Warning: {warning}", err=True, fg="yellow")
