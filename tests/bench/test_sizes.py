from __future__ import annotations

import pytest

from hvdtrain.bench import sizes
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", (4,)),
        ("64K", (65536,)),
        ("16M,1M,1m", (1 << 20, 16 << 20)),
        ("4..256", (4, 16, 64, 256)),
        ("4..300,1KiB", (4, 16, 64, 256, 1024)),
        ("1G", (1 << 30,)),
    ],
)
def test_sizes_are_read(text: str, expected: tuple[int, ...]):
    assert sizes.parse(text) == expected


def test_the_default_goes_from_4_bytes_to_256_mib():
    found = sizes.parse("4..256M")
    assert (found[0], found[-1], len(found)) == (4, 256 << 20, 14)


@pytest.mark.parametrize(
    ("text", "why"),
    [("3x", "'3x' is no size"), ("", "is no size"), ("0", "multiple of 4"), ("6", "multiple of 4"), ("1M..4", "begins above")],
)
def test_what_is_no_size_is_refused(text: str, why: str):
    with pytest.raises(UsageError, match=why) as caught:
        sizes.parse(text)
    assert "4, 64K or 16M" in caught.value.hint


@pytest.mark.parametrize(("size", "text"), [(4, "4 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (256 << 20, "256 MiB")])
def test_sizes_are_written(size: int, text: str):
    assert sizes.text(size) == text
