"""Which network interface the ranks talk over: one in a subnet that all hosts share, and never a container's bridge.

MPI, Gloo and NCCL each guess when they are not told, and a wrong guess (docker0 has the same address everywhere) is a hang.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import UsageError

#: What the kernel and every launcher take for a name: at most 15 characters, nothing that is split or is an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}", re.ASCII)
#: Bridges and pairs that container and virtual machine software makes; their addresses repeat from host to host.
_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|podman|lxc|lxd|kube|vmnet|vnet|dummy|nodelocaldns)")


@dataclass(frozen=True)
class Interface:
    """A network interface of a host. ``speed`` in Mbit/s, 0 if it does not say."""

    name: str
    addresses: tuple[str, ...] = ()  # with prefix length: 10.0.0.1/24
    up: bool = True
    loopback: bool = False
    speed: int = 0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Interface:
        return cls(
            str(record["name"]),
            tuple(record.get("addresses", ())),
            bool(record.get("up", True)),
            bool(record.get("loopback", False)),
            int(record.get("speed", 0)),
        )

    def why_not(self) -> str:
        """Why the ranks must not use it by themselves, or an empty string."""
        if self.loopback or self.name == "lo":
            return "loopback"
        if not self.up:
            return "down"
        if _VIRTUAL.match(self.name):
            return "made by container software"
        if not self.subnets():
            return "no usable address"
        return ""

    def subnets(self) -> list[str]:
        """The subnets of its addresses that reach other hosts."""
        found = []
        for address in self.addresses:
            interface = ipaddress.ip_interface(address)
            if not (interface.is_link_local or interface.is_loopback) and interface.network.prefixlen < interface.max_prefixlen:
                found.append(str(interface.network))
        return found

    def addresses_in(self, net: str) -> list[str]:
        """Its addresses in a subnet, without the prefix length."""
        interfaces = [ipaddress.ip_interface(address) for address in self.addresses]
        return [str(each.ip) for each in interfaces if str(each.network) == net]


@dataclass(frozen=True)
class Network:
    """The interfaces to use, by name (all that are needed, where hosts call them differently) and their subnet; and why."""

    names: tuple[str, ...]
    subnet: str
    reason: str
    warnings: tuple[str, ...] = ()


def choose(tables: Mapping[str, Sequence[Interface]]) -> Network:
    """The fastest interface whose subnet every host has. Without one, nothing is chosen and the reason says what there is."""
    usable = {host: _by_subnet(table) for host, table in tables.items()}
    first, *others = usable.values()
    common = [net for net in first if all(net in other for other in others) and _all_differ(net, usable.values())]
    if not common:
        seen = "; ".join(f"{host}: {_shown(table)}" for host, table in list(tables.items())[:4])
        return Network((), "", f"no subnet is common to all hosts ({seen})")
    best = max(
        common, key=lambda net: (ipaddress.ip_network(net).version == 4, min(by_net[net].speed for by_net in usable.values()))
    )
    names = tuple(dict.fromkeys(by_net[best].name for by_net in usable.values()))
    left_out = dict.fromkeys(f"{each.name}: {each.why_not()}" for table in tables.values() for each in table if each.why_not())
    without = f"; not used: {', '.join(left_out)}" if left_out else ""
    return Network(names, best, f"{'/'.join(names)}, in the subnet {best} of all {len(tables)} hosts{without}")


def _by_subnet(table: Sequence[Interface]) -> dict[str, Interface]:
    """A host's interface in each of its subnets: the fastest, where there are several."""
    slowest_first = sorted((each for each in table if not each.why_not()), key=lambda each: each.speed)
    return {net: each for each in slowest_first for net in each.subnets()}


def _all_differ(net: str, hosts: Iterable[Mapping[str, Interface]]) -> bool:
    """Whether each host has addresses of its own there. A virtual machine's private network looks the same on every host."""
    seen = [address for by_net in hosts for address in by_net[net].addresses_in(net)]
    return len(seen) == len(set(seen))


def check(wanted: Sequence[str], tables: Mapping[str, Sequence[Interface]], *, complete: bool = True) -> Network:
    """The user's choice, if every host has one of these interfaces, and some host has each of them; a warning where one is down.

    Args:
        complete: every host has been asked. If not, what is missing here may be elsewhere: a warning.

    Raises:
        UsageError: with the interfaces that there are.
    """
    odd = next((name for name in wanted if not _NAME.fullmatch(name)), None)
    if odd is not None:
        raise UsageError(f"--nic {odd!r} cannot be the name of a network interface", "write for example --nic eth0")
    there = {each.name for table in tables.values() for each in table}
    unknown = {name: list(tables) for name in wanted if name not in there}
    without = [host for host, table in tables.items() if not any(each.name in wanted for each in table)]
    missing = {", ".join(wanted): without} if without else unknown
    warnings = [
        f"{each.name} is down on {host}"
        for host, table in tables.items()
        for each in table
        if each.name in wanted and not each.up
    ]
    for name, hosts in missing.items():
        shown = "; ".join(f"{host} has {_shown(tables[host])}" for host in hosts[:4])
        sentence = f"{', '.join(hosts[:8])} {'has' if len(hosts) == 1 else 'have'} no network interface '{name}'"
        if complete:
            raise UsageError(sentence, shown)
        warnings.append(f"{sentence}, and the other hosts were not asked ({shown})")
    return Network(tuple(wanted), "", "asked for with --nic", tuple(warnings))


def _shown(table: Sequence[Interface]) -> str:
    return ", ".join(
        f"{each.name} ({', '.join(each.addresses) or 'no address'}{'' if each.up else ', down'})" for each in table
    )
