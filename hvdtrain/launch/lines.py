r"""A stream of bytes as lines of text. A line ends at ``\n``, ``\r\n`` or ``\r``."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

#: From this length on, text that has no end of line is handed on as if it had one: it is to be seen, and not kept in memory.
MAX_CHARS = 1 << 20

_END = re.compile(r"\r\n|\n|\r")


class Lines:
    """Feed it what was read; it gives (text, progress). ``progress``: a ``\\r`` ended it, so the next one is to overwrite it.

    Nothing is lost: bytes that are not UTF-8 are written out as ``\\xff``. Each character is looked at once.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        self._parts: list[str] = []  # of the line that has not ended
        self._size = 0
        self._carriage = ""  # a \r that came last: the \n may still come

    def feed(self, data: bytes) -> Iterator[tuple[str, bool]]:
        text = self._carriage + self._decode(data)
        self._carriage = "\r" if text.endswith("\r") else ""
        start, end = 0, len(text) - len(self._carriage)
        for match in _END.finditer(text, 0, end):
            yield self._take(text[start : match.start()]), match[0] == "\r"
            start = match.end()
        self._parts.append(text[start:end])
        self._size += end - start
        if self._size >= MAX_CHARS:
            yield self._take(""), False

    def close(self) -> Iterator[tuple[str, bool]]:
        """What is left when the stream ends."""
        rest = self._take(self._decode(b"", True))
        if rest or self._carriage:
            yield rest, bool(self._carriage)

    def _take(self, last: str) -> str:
        text = "".join([*self._parts, last])
        self._parts.clear()
        self._size = 0
        return text
