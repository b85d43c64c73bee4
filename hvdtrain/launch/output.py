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
    r"|mpirun: Forwarding signal \d+ to job"
)
#: Boxes of Open MPI's about what we tell better: who failed, or that a signal ended the job.
_BOX = re.compile(r"MPI_ABORT was invoked on rank |An MPI communication peer process has unexpectedly disconnected\.")
_AROUND = re.compile(
    r"\[[^\]]+\] (?:\[\[[^\]]*\],\d+\] ORTE_ERROR_LOG: .* in file \S*show_help\.c |"
    r"PMIX ERROR: UNREACHABLE in file |\d+ more process(?:es)? ha(?:s|ve) sent help message "
    r"help-mpi-(?:btl-tcp\.txt / peer hung up|api\.txt / mpi-abort)|Set MCA parameter \"orte_base_help_aggregate\")"
)
#: The same of horovodrun's driver of elastic jobs: exceptions at the end of its tracebacks, and lines around them.
_GIVEN_UP = re.compile(r"RuntimeError: Horovod detected that one or more processes|BrokenPipeError|ConnectionResetError")
_AFTERWARDS = re.compile(r"Process name: |Exit code: |-{40}$|Exception occurred during processing of request from|$")
_RULE = re.compile(r"-{60,}\s*")
_LONGEST_BOX = 24

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


class Boxes:
    """Keeps known boxes back from what a launcher says on one stream; ``hidden`` has their lines.

    A box is text between two rules; the first rule is held until the next line says what it begins.
    """

    def __init__(self) -> None:
        self.hidden: list[str] = []
        self._rule: list[str] = []  # one that has not been told to belong to a box
        self._left = 0  # lines that the known box we are in may still have
        self._in_other = False

    def feed(self, text: str) -> list[str]:
        """The lines to show now."""
        is_rule = _RULE.fullmatch(text) is not None
        if self._left or _BOX.match(text) or _AROUND.match(text):
            if not self._left and _BOX.match(text):
                self._left, self._in_other = _LONGEST_BOX, False
                self.hidden += self.rest()
            self.hidden.append(text)
            self._left = 0 if is_rule else max(self._left - 1, 0)
            return []
        if is_rule and not self._in_other:
            shown, self._rule = self._rule, [text]
            return shown
        self._in_other = not is_rule and (self._in_other or bool(self._rule))
        return [*self.rest(), text]

    def rest(self) -> list[str]:
        """What is still held."""
        held, self._rule = self._rule, []
        return held


class Tracebacks:
    """Keeps back where in horovodrun's own code an elastic job was given up, and what its server says of ranks that are gone.

    What its tracebacks say in the end is shown, unless it is that a rank failed: that is told better.
    """

    def __init__(self) -> None:
        self.hidden: list[str] = []
        self._inside = False

    def feed(self, text: str) -> list[str]:
        """The lines to show now."""
        begins = text.startswith("Traceback (most recent call last):")
        part = begins or (self._inside and text[:1] in ("", " "))
        ended, self._inside = self._inside and not part, part
        if part or (_GIVEN_UP if ended else _AFTERWARDS).match(text):
            self.hidden.append(text)
            return []
        return [text]

    def rest(self) -> list[str]:
        """What is still held."""
        return []


class RankFiles:
    """``rank-03/stdout`` and ``rank-03/stderr`` below a folder; numbers are padded so that names sort. ``launcher``: its own text."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._width = len(str(max(size - 1, 0)))
        self._open: OrderedDict[Path, IO[str]] = OrderedDict()
        self._given_up = False

    def path(self, rank: int, stream: str) -> Path:
        return self._folder / f"rank-{rank:0{self._width}}" / f"std{stream}"

    def start(self, rank: int) -> None:
        """Make the rank's files: an empty one says that the rank has written nothing."""
        for stream in ("out", "err"):
            self._append(self.path(rank, stream), "")

    def write(self, line: Line) -> None:
        self._append(self.path(line.rank, line.stream), f"{line.text}\n")

    def note(self, text: str) -> None:
        """A line of the launcher's own."""
        self._append(self._folder / "launcher", f"{text}\n")

    def _append(self, path: Path, text: str) -> None:
        """The first failure (a full disk, no permission) is logged, and what follows is not written."""
        if self._given_up:
            return
        try:
            self._file(path).write(text)
        except OSError as error:
            self._given_up = True
            log.warning("the ranks' output is not written to %s any more: %s", self._folder, error.strerror)
            self.close()

    def close(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                self._open.popitem()[1].close()

    def _file(self, path: Path) -> IO[str]:
        if path not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:  # thousands of ranks have more files than a process may hold open
                self._open.popitem(last=False)[1].close()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[path] = path.open("a", encoding="utf-8", buffering=1)
        self._open.move_to_end(path)
        return self._open[path]
