"""Lines out of a stream of bytes."""

from __future__ import annotations

import time

import pytest

from hvdtrain.launch.lines import MAX_CHARS, Lines


def split(*pieces: bytes) -> list[tuple[str, bool]]:
    lines = Lines()
    return [*(line for piece in pieces for line in lines.feed(piece)), *lines.close()]


CASES = {
    "whole lines": ([b"a\nb\n"], [("a", False), ("b", False)]),
    "pieces of a line": ([b"a", b"b", b"c\n"], [("abc", False)]),
    "a last line without an end": ([b"a\nb"], [("a", False), ("b", False)]),
    "lines of another system, cut in two": ([b"a\r", b"\nb\r\n"], [("a", False), ("b", False)]),
    "progress": ([b"1%\r2%\r", b"3%\n"], [("1%", True), ("2%", True), ("3%", False)]),
    "progress that begins with its carriage": ([b"\r1%", b"\r2%"], [("", True), ("1%", True), ("2%", False)]),
    "progress at the end": ([b"1%\r"], [("1%", True)]),
    "a character in two pieces": ([b"\xc3", b"\xbc\n"], [("ü", False)]),
    "what is no character": ([b"\xff\xc3\n", b"\xe2\x82"], [("\\xff\\xc3", False), ("\\xe2\\x82", False)]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CASES)
def test_lines_are_whole_however_they_come(name: str) -> None:
    pieces, expected = CASES[name]
    assert split(*pieces) == expected
    whole = b"".join(pieces)
    assert split(*(whole[at : at + 1] for at in range(len(whole)))) == expected


def test_text_without_an_end_of_line_is_handed_on_in_parts_and_each_byte_is_looked_at_once() -> None:
    """Twenty times that amount in small pieces would take minutes if each were joined to all before it."""
    started = time.monotonic()
    got = split(*[b"\xc3\xbcx" * 20] * 200_000, b"\nend\n")
    assert time.monotonic() - started < 10
    assert "".join(text for text, _ in got) == "üx" * 4_000_000 + "end"
    assert all(len(text) < MAX_CHARS + 100 for text, _ in got)
