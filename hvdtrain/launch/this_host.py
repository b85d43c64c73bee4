"""This host, as it tells of itself when it is asked before a job: where it is, what is installed, what it has.

``start.py this_host JSON`` runs on every host.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import ipaddress
import json
import os
import platform
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.launch import is_this_machine, resources
from hvdtrain.launch.nics import Interface

#: Comes before the answer: a login shell may print things of its own.
MARK = "\x1e"


def is_here(name: str, addresses: frozenset[str]) -> bool:
    """Whether the name is this machine's, by itself or by its address."""
    if is_this_machine(name) or name == socket.gethostname():
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(found & addresses)


def own_addresses() -> frozenset[str]:
    return frozenset(address.partition("/")[0] for each in interfaces() for address in each.addresses)


def interfaces() -> list[Interface]:
    """This machine's network interfaces, from the kernel."""
    addresses: dict[str, list[str]] = {}
    for name, address, mask in _ipv4():
        addresses.setdefault(name, []).append(f"{address}/{ipaddress.ip_network(f'0.0.0.0/{mask}').prefixlen}")
    for name, address6 in _ipv6():
        addresses.setdefault(name, []).append(address6)
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        flags = int(_text(folder / "flags") or "0", 16)
        up = bool(flags & 1) and _text(folder / "carrier") != "0"
        speed = _text(folder / "speed")
        known = int(speed) if speed.isdigit() else 0
        found.append(Interface(name, tuple(addresses.get(name, ())), up, bool(flags & 8), known))
    return found


def _ipv4() -> list[tuple[str, str, str]]:
    """(name, address, mask) of every IPv4 address, aliases too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        buffer = array.array("B", bytes(40 * 256))
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(sock.fileno(), 0x8912, request))[0]  # SIOCGIFCONF
        data, found = buffer.tobytes(), []
        for at in range(0, length, 40):
            name = data[at : at + 16].partition(b"\0")[0]
            address = socket.inet_ntoa(data[at + 20 : at + 24])
            try:
                mask = fcntl.ioctl(sock.fileno(), 0x891B, struct.pack("256s", name[:15]))[20:24]  # SIOCGIFNETMASK
            except OSError:
                continue
            found.append((name.decode().partition(":")[0], address, socket.inet_ntoa(mask)))
    return found


def _ipv6() -> list[tuple[str, str]]:
    found = []
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        digits, _, prefix, _, _, name = line.split()
        found.append((name, f"{ipaddress.IPv6Address(int(digits, 16))}/{int(prefix, 16)}"))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def describe(cwd: str, paths: Sequence[str], launcher: str) -> dict[str, Any]:
    """What this host says about itself."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "package": digest.hexdigest(),
        "cwd": os.path.isdir(cwd),
        "paths": {path: _digest(os.path.join(cwd, path)) for path in paths},
        "launcher_resolves": _resolves(launcher),
        "nics": [
            {"name": each.name, "addresses": each.addresses, "up": each.up, "loopback": each.loopback, "speed": each.speed}
            for each in interfaces()
        ],
        "cpus": resources.usable_cpus(resources.affinity()),
        "gpus": resources.gpus({}),
    }


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """``start.py this_host JSON``: print the description."""
    question = json.loads(argv[0])
    print(f"{MARK}{json.dumps(describe(question['cwd'], question['paths'], question['launcher']))}", flush=True)
    return 0
