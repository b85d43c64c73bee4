"""Leaving hosts and slots out: ``--include node[01-04]``, ``--exclude node3:0,2-3``.

A filter names hosts (a range is fine) and, after a colon, slots counted from 0. Slots are devices: the ranks of a host that keeps
slots 1 and 3 get its GPUs 1 and 3. First everything that is not included goes, then what is excluded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, nodelist
from hvdtrain.launch.hostnames import ipv6, machine


def apply(hosts: Sequence[Host], include: Sequence[str], exclude: Sequence[str]) -> tuple[Host, ...]:
    """The hosts with the slots that are left.

    Raises:
        UsageError: a filter names a host or a slot that is not there, or nothing is left.
    """
    kept = {machine(host.name): list(range(host.slots)) for host in hosts}
    if include:
        wanted = _read("--include", include, hosts)
        kept = {name: [slot for slot in slots if slot in wanted.get(name, ())] for name, slots in kept.items()}
    for name, slots in _read("--exclude", exclude, hosts).items():
        kept[name] = [slot for slot in kept[name] if slot not in slots]
    left = tuple(_with_slots(host, kept[machine(host.name)]) for host in hosts if kept[machine(host.name)])
    if not left:
        raise UsageError("--include and --exclude leave no slot", "see the hosts with: hvdtrain hosts show")
    return left


def _with_slots(host: Host, slots: list[int]) -> Host:
    if slots == list(range(host.slots)):
        return host
    numbers = host.devices or tuple(range(host.slots))
    return replace(host, slots=len(slots), devices=tuple(numbers[slot] for slot in slots))


def _read(option: str, items: Sequence[str], hosts: Sequence[Host]) -> dict[str, set[int]]:
    known = {machine(host.name): host for host in hosts}
    found: dict[str, set[int]] = {}
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
            found.setdefault(machine(host.name), set()).update(_slots(option, item, slots.removeprefix(":"), host))
    return found


def _slots(option: str, item: str, text: str, host: Host) -> set[int]:
    if not text:
        return set(range(host.slots))
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
        chosen.update(range(low, high + 1))
    beyond = [slot for slot in chosen if slot >= host.slots]
    if beyond:
        raise UsageError(
            f"{option} {item}: {host.name} has slots 0 to {host.slots - 1}, not {min(beyond)}",
            f"raise the slots of {host.name}, or leave it out",
        )
    return chosen
