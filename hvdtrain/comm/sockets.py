"""The network connections of this process, by what Linux calls them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Set as AbstractSet

_FOLDER = "/proc/self/fd"


def opened() -> frozenset[str]:
    """The sockets that are open now."""
    return frozenset(name for name, _ in _all())


def hang_up(names: AbstractSet[str]) -> None:
    """End the TCP connections among these sockets: whoever waits at the other end for a word hears of it.

    They are not closed, since another part of this process owns them.
    """
    for name, number in _all():
        if name in names:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.shutdown(socket.SHUT_RDWR)


def _all() -> list[tuple[str, int]]:
    found = []
    for entry in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):
            name = os.readlink(f"{_FOLDER}/{entry}")
            if name.startswith("socket:"):
                found.append((name, int(entry)))
    return found
