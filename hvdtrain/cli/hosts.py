"""``hvdtrain hosts``: look at a list of hosts, check it, write it in another dialect. Only ``check --connect`` goes to a host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch import (
    Host,
    Ssh,
    allocation,
    dialects,
    filters,
    fit,
    is_this_machine,
    place,
    placement,
    probe,
    process,
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
    kept = filters.apply(listed.hosts, include, exclude)
    used = fit(kept, sum(host.slots for host in kept) if np is None else np, source=listed.source)
    rows = _rows(used)
    if as_json:
        unused = filters.unused(listed.hosts, used)
        click.echo(
            json.dumps({"source": listed.source, "warnings": listed.warnings, "ranks": rows, "unused": unused}, indent=2)
        )
        return 0
    _warn(listed.warnings)
    click.echo(f"{len(rows)} ranks on {len(used)} hosts ({listed.source})\n")
    click.echo(_table([{key.replace("_", " "): str(value) for key, value in row.items()} for row in rows]))
    without_rank = filters.unused_text(listed.hosts, used)
    if without_rank:
        click.echo(f"\n{without_rank}")
    return 0


def _rows(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """A row for each rank. UsageError if ranks on this machine would share a GPU."""
    devices = [_devices(host) for host in hosts]
    return [
        {
            "rank": slot.rank,
            "host": slot.host.name,
            "local_rank": slot.local_rank,
            "local_size": slot.local_size,
            "node_rank": slot.node_rank,
            "cross_rank": slot.cross_rank,
            "device": devices[slot.node_rank][slot.local_rank],
        }
        for slot in place(hosts)
    ]


def _devices(host: Host) -> Sequence[str]:
    """What each local rank gets: on this machine the GPU by CUDA's name for it, or the CPU; elsewhere the GPU's number."""
    if not is_this_machine(host.name):
        return [str(number) for number in host.devices or range(host.slots)]
    found = resources.gpus(os.environ)
    if not found and not (host.devices and "CUDA_VISIBLE_DEVICES" in os.environ):
        return ["cpu"] * host.slots
    try:
        names = placement.cuda_names(host.devices, os.environ) if host.devices else found
    except placement.DeviceError as error:
        raise UsageError(f"{host.name}: {error}", "choose among these, or change CUDA_VISIBLE_DEVICES") from None
    if host.slots > len(names):
        raise UsageError(
            f"{host.slots} ranks on {host.name}, which offers {len(names)} GPUs ({', '.join(names)})",
            "lower its slots, or run with --share-devices",
        )
    return names


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns as wide as their longest entry; a table of a hundred thousand ranks is printed as fast as it is read."""
    columns = {heading: max(len(heading), *(len(row[heading]) for row in rows)) for heading in rows[0]}
    lines = [{heading: heading for heading in columns}, *rows]
    return "\n".join("  ".join(_cell(key, line[key], width) for key, width in columns.items()) for line in lines)


def _cell(heading: str, text: str, width: int) -> str:
    return text.ljust(width) if heading == "host" else text.rjust(width)


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
    """What the hosts say, which cannot take part, and warnings. Each is asked twice, since a launcher connects twice."""
    ssh, start, cwd = Ssh(ssh_port), start_argv(sys.executable), os.getcwd()
    with process.unwinding():
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
    return told, bad + probe.second(first, again) + _twice(first), probe.differences(first) + _crowded(hosts, first)


def _twice(answers: Sequence[probe.Answer]) -> list[probe.Answer]:
    """Hosts that turned out to be one machine under several names."""
    known: dict[tuple[str, frozenset[str]], str] = {}
    found = []
    for answer in answers:
        if answer.record:
            usable = frozenset(address for each in answer.interfaces if not each.why_not() for address in each.addresses)
            first = known.setdefault((answer.record["host"], usable), answer.host)
            if first != answer.host:
                problem = f"is the same machine as {first} ({answer.record['host']})"
                found.append(
                    probe.Answer(answer.host, problem=problem, hint=f"name it once, with all its slots: '{first} slots=4'")
                )
    return found


def _crowded(hosts: Sequence[Host], answers: Sequence[probe.Answer]) -> list[str]:
    """Sentences about hosts that have GPUs, but fewer than slots."""
    counts = {answer.host: len(answer.record["gpus"]) for answer in answers if answer.record}
    return [
        f"{host.name} has {host.slots} slots and {counts[host.name]} GPUs: lower its slots, or run with --share-devices"
        for host in hosts
        if 0 < counts.get(host.name, 0) < host.slots
    ]


_DIALECTS = "\n".join(f"  {name:<10} {dialect.about}" for name, dialect in dialects.DIALECTS.items())


@command.command(epilog=f"\b\nDialects:\n{_DIALECTS}")
@source_options
@click.option("--to", "dialect", type=click.Choice(list(dialects.DIALECTS)), metavar="DIALECT", required=True)
def convert(path: str | None, hosts: str | None, include: tuple[str, ...], exclude: tuple[str, ...], dialect: str) -> int:
    """Write a list of hosts in another dialect, to standard output."""
    listed = _listed(path, hosts)
    kept = filters.apply(listed.hosts, include, exclude)
    _warn([*listed.warnings, *dialects.warnings(kept, dialect)])
    click.echo(dialects.render(kept, dialect), nl=False)
    return 0


def _listed(path: str | None, hosts: str | None, *, strict: bool = False) -> Hosts:
    found = allocation.hosts(os.environ, hosts, path, strict=strict)
    if found is None:
        raise UsageError(
            "no hosts: no hostfile, no -H, and this shell is in no Slurm, PBS or LSF job", "hvdtrain hosts show HOSTFILE"
        )
    return found


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.secho(f"Warning: {warning}", err=True, fg="yellow")
