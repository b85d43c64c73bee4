"""Ranks' lines for people: a prefix with rank and host, a colour for each rank, a file for each rank and stream."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvdtrain.launch.frames import Line

#: Bright enough on light and dark terminals; rank 0 and its neighbours differ.
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
_MAX_OPEN_FILES = 128
#: What TensorFlow 2.21 writes at each import, before any setting could silence it: known, and no news.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|I0000 .* port\.cc:\d+\] oneDNN custom operations are on"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Style:
    """How a line is shown. ``only_primary`` hides what other ranks say (it is still written to their files)."""

    size: int
    colour: bool = False
    prefix: bool = True
    timestamps: bool = False
    only_primary: bool = False

    def shows(self, line: Line) -> bool:
        return (line.rank == 0 or not self.only_primary) and not is_noise(line.text)

    def render(self, line: Line, now: float = 0.0) -> str:
        """The line with its prefix ``[rank host]``, without the newline."""
        clock = time.strftime("%H:%M:%S ", time.localtime(now)) if self.timestamps else ""
        if not self.prefix:
            return f"{clock}{line.text}"
        prefix = f"[{line.rank:>{len(str(max(self.size - 1, 0)))}} {line.host}]"
        if self.colour:
            prefix = f"\x1b[{_COLOURS[line.rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        return f"{clock}{prefix} {line.text}"


def is_noise(text: str) -> bool:
    """Whether a line is known to say nothing. Files get it all the same."""
    return _NOISE.match(text) is not None


class RankFiles:
    """``rank-03/stdout`` and ``rank-03/stderr`` below a folder; numbers are padded so that names sort."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._width = len(str(max(size - 1, 0)))
        self._open: OrderedDict[tuple[int, str], IO[str]] = OrderedDict()
        self._given_up = False

    def path(self, rank: int, stream: str) -> Path:
        return self._folder / f"rank-{rank:0{self._width}}" / f"std{stream}"

    def start(self, rank: int) -> None:
        """Make the rank's files: an empty one says that the rank has written nothing."""
        for stream in ("out", "err"):
            self._append(rank, stream, "")

    def write(self, line: Line) -> None:
        self._append(line.rank, line.stream, f"{line.text}\n")

    def _append(self, rank: int, stream: str, text: str) -> None:
        """The first failure (a full disk, no permission) is logged, and what follows is not written."""
        if self._given_up:
            return
        try:
            self._file(rank, stream).write(text)
        except OSError as error:
            self._given_up = True
            log.warning("the ranks' output is not written to %s any more: %s", self._folder, error.strerror)
            self.close()

    def close(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                self._open.popitem()[1].close()

    def _file(self, rank: int, stream: str) -> IO[str]:
        key = (rank, stream)
        if key not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:  # thousands of ranks have more files than a process may hold open
                self._open.popitem(last=False)[1].close()
            path = self.path(rank, stream)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[key] = path.open("a", encoding="utf-8", buffering=1)
        self._open.move_to_end(key)
        return self._open[key]
