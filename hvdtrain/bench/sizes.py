"""Sizes of arrays as people write them: 4, 64K, 16M; K, M and G are powers of 1024."""

from __future__ import annotations

import re

from hvdtrain.errors import UsageError, shown

#: Arrays are of float32.
ITEM = 4
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HINT = "write sizes in bytes as 4, 64K or 16M: --sizes 1M,16M or --sizes 4..256M (powers of 4)"


def parse(text: str) -> tuple[int, ...]:
    """Bytes, in increasing order: a list with commas, whose members may be ranges ``low..high`` of powers of 4 times ``low``."""
    sizes: set[int] = set()
    for word in text.split(","):
        low, dots, high = word.partition("..")
        if not dots:
            sizes.add(_size(word))
            continue
        size, last = _size(low), _size(high)
        if size > last:
            raise UsageError(f"--sizes: {shown(word)} begins above its end", _HINT)
        while size <= last:
            sizes.add(size)
            size *= 4
    return tuple(sorted(sizes))


def _size(word: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMG]?)(i?B)?", word.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise UsageError(f"--sizes: {shown(word)!r} is no size", _HINT)
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size == 0 or size % ITEM:
        raise UsageError(f"--sizes: {shown(word)} is no multiple of {ITEM} bytes: arrays are of float32", _HINT)
    return size


def text(size: int) -> str:
    """``size`` for people: 4 B, 64 KiB, 1.5 MiB."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"
