"""Leaving hosts and slots out: ``--include node[01-04]``, ``--exclude node3:0,2-3``.

A filter names hosts (a range is fine) and, after a colon, slots counted from 0. Slots are devices: the ranks of a host that keeps
slots 1 and 3 get its GPUs 1 and 3. First everything that is not included goes, then what is excluded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, nodelist
from hvdtrain.launch.hostnames import ipv6, machine


def apply(hosts: Sequence[Host], include: Sequence[str], exclude: Sequence[str]) -> tuple[Host, ...]:
    """The hosts with the slots that are left.

    Raises:
        UsageError: a filter names a host or a slot that is not there, or nothing is left.
    """
    wanted, unwanted = _read("--include", include, hosts), _read("--exclude", exclude, hosts)
    if not include:
        wanted = dict.fromkeys((machine(host.name) for host in hosts), None)
    kept = ((host, _kept(host, wanted.get(machine(host.name), ()), unwanted.get(machine(host.name), ()))) for host in hosts)
    left = tuple(_with_slots(host, slots) for host, slots in kept if slots)
    if not left:
        raise UsageError("--include and --exclude leave no slot", "see the hosts with: hvdtrain hosts show")
    return left


def _kept(host: Host, wanted: Collection[int] | None, unwanted: Collection[int] | None) -> Sequence[int]:
    """The slots of a host that are left; None stands for all of them, which are never written out one by one."""
    slots = range(host.slots) if wanted is None else sorted(wanted)
    return () if unwanted is None else slots if not unwanted else [slot for slot in slots if slot not in unwanted]


def unused(hosts: Sequence[Host], used: Sequence[Host]) -> dict[str, int]:
    """The slots of each host that get no rank, since a filter left them out or there are fewer ranks than slots."""
    taken = {host.name: host.slots for host in used}
    return {host.name: free for host in hosts if (free := host.slots - taken.get(host.name, 0)) > 0}


def unused_text(hosts: Sequence[Host], used: Sequence[Host]) -> str:
    """What ``unused`` says, for people; empty where every slot has a rank."""
    whole = {host.name: host.slots for host in hosts}
    free = unused(hosts, used)
    parts = [name if count == whole[name] else f"{count} of {whole[name]} slots of {name}" for name, count in free.items()]
    return f"not used: {', '.join(parts[:8])}{f' and {len(parts) - 8} more hosts' if len(parts) > 8 else ''}" if parts else ""


def _with_slots(host: Host, slots: Sequence[int]) -> Host:
    if len(slots) == host.slots:
        return host
    numbers = host.devices or range(host.slots)
    return replace(host, slots=len(slots), devices=tuple(numbers[slot] for slot in slots))


def _read(option: str, items: Sequence[str], hosts: Sequence[Host]) -> dict[str, set[int] | None]:
    """Machine -> the slots that the items name; None is all of them."""
    known = {machine(host.name): host for host in hosts}
    found: dict[str, set[int] | None] = {}
    for item in items:
        named, mark, slots = item.partition("]") if item.startswith("[") else item.partition(":")
        try:
            names = [ipv6(named[1:])] if mark == "]" else nodelist.expand(named)
        except UsageError as error:
            raise UsageError(f"{option} {item}: {error.message}", f"write {option} 'node[01-04]'") from None
        for name in names:
            host = known.get(machine(name))
            if host is None:
                near = difflib.get_close_matches(name, [each.name for each in hosts], 1)
                hint = f"did you mean {near[0]}?" if near else f"the hosts are {', '.join(each.name for each in hosts[:8])}"
                raise UsageError(f"{option} {item}: there is no host '{name}'", hint)
            before, more = found.get(machine(name), set()), _slots(option, item, slots.removeprefix(":"), host)
            found[machine(name)] = None if before is None or more is None else before | more
    return found


def _slots(option: str, item: str, text: str, host: Host) -> set[int] | None:
    if not text:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part, re.ASCII)
        if match is None:
            raise UsageError(
                f"{option} {item}: '{part}' is not a slot or a range of slots", f"write {option} {host.name}:0,2-3"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise UsageError(f"{option} {item}: the range '{part}' runs backwards", f"write {option} {host.name}:{high}-{low}")
        if high >= host.slots:
            raise UsageError(
                f"{option} {item}: {host.name} has slots 0 to {host.slots - 1}, not {max(low, host.slots)}",
                f"raise the slots of {host.name}, or leave it out",
            )
        chosen.update(range(low, high + 1))
    return chosen
