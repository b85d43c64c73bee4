"""What a host may be called, and which names say by themselves that they are one machine. Nothing here asks a resolver.

A host name is RFC 1123's: parts joined by dots, each of 1 to 63 letters, digits and '-' and with a letter or a digit at both ends,
253 characters in all. Two decisions beside it: inside a part '_' is taken too, since containers are named so; a dot at the end is
refused, since launchers compare names and would take ``a.`` and ``a`` for two hosts. A name that ends in a number is an IPv4
address with four of them: resolvers read ``127.1`` and ``0x7f000001`` as addresses. So no name is an option or a command to ssh or
a shell.
"""

from __future__ import annotations

import ipaddress
import re

from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import is_this_machine
from hvdtrain.launch.nodelist import MAX_LENGTH

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII | re.IGNORECASE)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)

_FORM = "a host name has letters, digits, '.', '_' and '-', and begins and ends with a letter or a digit"


def check(name: str) -> str:
    """The name, if it is a host name or an IPv4 address; UsageError says what is wrong with it."""
    if len(name) > MAX_LENGTH or _NAME.fullmatch(name) is None:
        raise UsageError(_problem(name), _FORM)
    if _NUMBER.fullmatch(name.rpartition(".")[2]) is not None:
        try:
            _of_a_host(ipaddress.IPv4Address(name))
        except ValueError:
            raise UsageError(
                f"'{shown(name)}' ends in a number, so it is no host name, and it is no IPv4 address of a host",
                "write all four numbers, '10.0.0.1 slots=4', or a name, 'node01 slots=4'",
            ) from None
    return name


def _problem(name: str) -> str:
    if not name:
        return "the host name is empty"
    said = f"host name '{shown(name)}'"
    if name.startswith("-"):
        return f"{said} begins with '-'"
    odd = next((char for char in name if re.fullmatch(r"[A-Za-z0-9._-]", char, re.ASCII) is None), "")
    if odd:
        return f"{said} contains '{shown(odd)}'"
    if len(name) > MAX_LENGTH:
        return f"{said} is longer than {MAX_LENGTH} characters"
    if "" in name.split("."):
        return f"{said} has a dot too many"
    part = next(part for part in name.split(".") if _NAME.fullmatch(part) is None)
    if len(part) > 63:
        return f"{said} has a part of more than 63 characters"
    return f"{said} has '{part[0]}' at the beginning" if not part[0].isalnum() else f"{said} has '{part[-1]}' at the end"


def ipv6(address: str) -> str:
    """An IPv6 address in its shortest form. UsageError for what is none, or holds on one host only (a zone, fe80::1%eth0)."""
    try:
        if "%" in address:
            raise ValueError
        parsed = ipaddress.IPv6Address(address)
        _of_a_host(parsed)
    except ValueError:
        raise UsageError(f"'[{shown(address)}]' is no IPv6 address of a host", "write '[fd00::1]:4'") from None
    if parsed.ipv4_mapped is not None:
        raise UsageError(f"'[{address}]' is an IPv4 address", f"write '{parsed.ipv4_mapped}:4'")
    return str(parsed)


def _of_a_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.is_unspecified or address.is_multicast:
        raise ValueError


def user(name: str) -> str:
    """The name, if it is a user's."""
    if _USER.fullmatch(name) is None:
        raise UsageError(f"'{shown(name)}' is not a user name", "write 'alice@node01 slots=4'")
    return name


def machine(name: str) -> str:
    """The same for names that are one machine without asking anybody: those of this machine, and what differs in case only."""
    return "localhost" if is_this_machine(name) else name.lower()
