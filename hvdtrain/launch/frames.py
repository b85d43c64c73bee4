r"""How ranks' output travels to the launcher: whole lines, each with its rank, host and stream.

Launchers forward output in chunks and mix those of several ranks inside a line. So every rank's relay writes frames, each of one
line: ``\x1e RANK SP KIND FLAG SP HOST \x1f TEXT \n``, with blanks after the host where the frame would be too short. Where a
launcher tags its chunks (``[1,3]<stdout>:``) a frame that was cut in two is put together again by the tags. Text without frames is
the launcher's own and passes through.
"""

from __future__ import annotations

import json
import re
import select
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

START, TEXT, GUARD = "\x1e", "\x1f", "\x1d"
#: Frames are short, so that the write of one is atomic (PIPE_BUF is 4096) and no launcher cuts it by its own limit.
MAX_TEXT = 900
#: And not too short. Open MPI 4 reads 4096 bytes, puts a tag of at most 50 before them and after each newline inside, and drops
#: what is then beyond 8192. Of frames this long 79 end within what it reads: 80 tags of 50 bytes and the text are 8096.
MIN_FRAME = 52

#: Open MPI 4 and 5, horovodrun --gloo.
_TAG = re.compile(rb"\[(?:[0-9]+,)?([0-9]+)\]<std(?:out|err|diag)>:")
#: The beginning of a tag at the end of what was read, or a whole one: what follows it is yet to come.
_PART_OF_TAG = re.compile(rb"\[[0-9,]{0,24}(?:\](?:<[a-z]{0,8}(?:>:?)?)?)?\Z")
_FRAME = re.compile(rb"([0-9]+) ([oexsr])([.+r]) ([^\x1f\x1e]*)\x1f([^\x1e]*)", re.DOTALL)

Kind = Literal["o", "e", "x", "s", "r"]

#: A rank whose environment has this may say its last words to its relay: a line that ``words_line`` makes, on stderr.
WORDS_WANTED = "HVDTRAIN_RELAY"
_WORDS = f"{START}w "
#: In words that are not the last ones: the rank lives, and the launcher is to hear them at once.
RUNNING = "running"


@dataclass(frozen=True)
class Line:
    """A line of a rank's output. ``progress``: it ended in a carriage return, so the next one is to overwrite it."""

    rank: int
    host: str
    stream: Literal["out", "err"]
    text: str
    progress: bool = False


@dataclass(frozen=True)
class Started:
    rank: int
    host: str


@dataclass(frozen=True)
class Ended:
    """A rank's process is gone; ``info`` holds its exit code and last words."""

    rank: int
    host: str
    info: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What a rank that lives, or its relay, says of itself: where it stands, or that it is stopped."""

    rank: int
    host: str
    info: Mapping[str, Any]


@dataclass(frozen=True)
class Note:
    """A line of the launcher's own. ``rank`` where the launcher tagged it."""

    text: str
    rank: int | None = None


Event = Line | Started | Ended | Report | Note


def encode(rank: int, host: str, kind: Kind, text: str, *, progress: bool = False) -> Iterator[bytes]:
    """The frames of one line of text. The text is made clean UTF-8, since a launcher that meets a stray byte may die of it."""
    clean = text.replace(START, "?").replace(TEXT, "?").replace(GUARD, "?").replace("\n", " ").replace("]<", f"]{GUARD}<")
    pieces = [clean[at : at + MAX_TEXT] for at in range(0, len(clean), MAX_TEXT)] or [""]
    for number, piece in enumerate(pieces, 1):
        flag = "+" if number < len(pieces) else "r" if progress else "."
        head = f"{START}{rank} {kind}{flag} {host}".encode("utf-8", "backslashreplace")
        tail = f"{TEXT}{piece}\n".encode("utf-8", "backslashreplace")
        yield head.ljust(MIN_FRAME - len(tail)) + tail


def blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The frames, several in one write as long as that is atomic."""
    block = b""
    for part in parts:
        if block and len(block) + len(part) > select.PIPE_BUF:
            yield block
            block = b""
        block += part
    if block:
        yield block


def encode_ended(rank: int, host: str, info: Mapping[str, Any]) -> Iterator[bytes]:
    return encode(rank, host, "x", json.dumps(info))


def encode_report(rank: int, host: str, info: Mapping[str, Any]) -> Iterator[bytes]:
    return encode(rank, host, "r", json.dumps(info))


def words_line(record: Mapping[str, Any]) -> str:
    """A rank's last words, as its relay takes them out of the rank's output."""
    return f"{_WORDS}{json.dumps(record, default=str)}\n"


def split_words(line: str) -> tuple[str, dict[str, Any] | None]:
    """A line of a rank as (text before, last words); what is not whole is text."""
    text, mark, record = line.partition(_WORDS)
    if mark:
        try:
            words = json.loads(record)
        except ValueError:
            return line, None
        if isinstance(words, dict):
            return text, words
    return line, None


class Decoder:
    """Bytes of a launcher's stdout or stderr in, events out."""

    def __init__(self) -> None:
        self._pending = b""  # what may be the beginning of a tag
        self._rank: int | None = None  # whose tag came last
        self._spaced: bool | None = None
        self._lanes: dict[int | None, bytes] = {}  # unfinished lines, one for each tagged rank
        self._texts: dict[tuple[int, bytes], list[str]] = {}  # unfinished long lines

    def feed(self, data: bytes) -> Iterator[Event]:
        data = self._pending + data
        cut = _PART_OF_TAG.search(data, max(0, len(data) - 48))
        at = cut.start() if cut else len(data)
        data, self._pending = data[:at], data[at:]
        yield from self._segments(data)

    def close(self) -> Iterator[Event]:
        """What is left when the stream ends."""
        yield from self._segments(self._pending)
        self._pending = b""
        for rank, rest in self._lanes.items():
            if rest:
                yield from self._line(rest, rank)
        self._lanes.clear()

    def _segments(self, data: bytes) -> Iterator[Event]:
        start = 0
        for tag in _TAG.finditer(data):
            yield from self._append(data[start : tag.start()])
            self._rank, start = int(tag[1]), tag.end()
            space = data[start : start + 1] == b" "
            if self._spaced is None:
                self._spaced = space  # Open MPI 5 writes a blank after each tag, the others write none
            start += self._spaced and space
        yield from self._append(data[start:])

    def _append(self, data: bytes) -> Iterator[Event]:
        if not data:
            return
        *lines, rest = (self._lanes.get(self._rank, b"") + data).split(b"\n")
        self._lanes[self._rank] = rest
        for line in lines:
            yield from self._line(line, self._rank)

    def _line(self, line: bytes, rank: int | None) -> Iterator[Event]:
        before, *frames = line.split(START.encode())
        if before.strip() or not frames:
            yield Note(before.decode("utf-8", "replace").rstrip("\r"), rank)
        for frame in frames:
            match = _FRAME.fullmatch(frame.rstrip(b"\r"))
            if match is None:
                yield Note(frame.decode("utf-8", "replace"), rank)
            else:
                yield from self._frame(match)

    def _frame(self, match: re.Match[bytes]) -> Iterator[Event]:
        rank, kind, flag, host = int(match[1]), match[2], match[3], match[4].decode("utf-8", "replace").rstrip(" ")
        pieces = self._texts.setdefault((rank, kind), [])
        pieces.append(match[5].decode("utf-8", "replace"))
        if flag == b"+":
            return
        del self._texts[rank, kind]
        text = "".join(pieces).replace(f"]{GUARD}<", "]<")
        if kind == b"s":
            yield Started(rank, host)
            return
        if kind in b"oe":
            yield Line(rank, host, "out" if kind == b"o" else "err", text, progress=flag == b"r")
            return
        try:
            info = json.loads(text)
        except ValueError:
            yield Note(text, rank)
            return
        yield Report(rank, host, info) if kind == b"r" else Ended(rank, host, info)
