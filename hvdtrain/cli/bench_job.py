"""The ranks of a benchmark: started through ``hvdtrain run``, or this process where a launcher has started it already."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hvdtrain.bench import events, job
from hvdtrain.bench.child import started
from hvdtrain.bench.events import Event, Finished, Note, Progress
from hvdtrain.bench.results import Report
from hvdtrain.errors import JobError
from hvdtrain.launch import process
from hvdtrain.world import World

#: Through a pipe, progress is a line so often.
_EVERY_S = 5.0


class Watcher:
    """Shows how far a benchmark is, on stderr, and keeps what it found: a bar on a terminal, lines through a pipe."""

    def __init__(self, title: str, jobs: int = 1) -> None:
        """``jobs``: how many there will be, one after the other; ``begin`` before each."""
        self._title, self._task = title, TaskID(0)
        self._jobs, self._begun = jobs, 0
        self._bar: Bar | None = None
        self._said_at = time.monotonic()
        self.report: Report | None = None

    def begin(self, what: str) -> None:
        """The next of several jobs."""
        self._progress(Progress(self._begun, self._jobs, what))
        self._begun += 1
        self.report = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.report = event.report
        elif isinstance(event, Note):
            self.say(f"Note: {event.text}")
        elif self._jobs == 1:
            self._progress(event)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(text, err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _progress(self, event: Progress) -> None:
        if sys.stderr.isatty():
            if self._bar is None:  # not before: a launcher has its own things to say until the ranks are there
                numbers = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
                self._bar = Bar(TextColumn(self._title), BarColumn(), *numbers, console=Console(stderr=True), transient=True)
                self._task = self._bar.add_task("", total=event.total)
                self._bar.start()
            self._bar.update(self._task, completed=event.done, total=event.total, description=event.what)
        elif time.monotonic() - self._said_at > _EVERY_S:
            self._said_at = time.monotonic()
            click.echo(f"{self._title}: {event.done} of {event.total} done; next: {event.what}", err=True)


@dataclass(frozen=True)
class Where:
    """Where the ranks are to run: ``words`` are options of ``hvdtrain run``."""

    words: tuple[str, ...] = ()
    #: whether any of them asks for a launcher
    alone: bool = False


def run(kind: str, plan: Any, where: Where, watcher: Watcher) -> int:
    """Measure; the exit code. Where it is 0 and this is rank 0, the watcher has the report."""
    if where.alone or World.from_env().size > 1:
        return job.run(kind, plan, watcher)
    python = (sys.executable, "-P", "-m")
    argv = (*python, "hvdtrain", "run", "--no-prefix", *where.words, "--", *python, "hvdtrain.bench.job", *job.argv(kind, plan))
    with process.unwinding(), started(argv) as child:
        assert child.stdout is not None
        for line in child.stdout:
            event = events.decode(line.rstrip("\n"))
            if event is not None:
                watcher(event)
            else:
                watcher.say(line.rstrip("\n"))
        code = child.wait()
    if code == 0 and watcher.report is None:
        raise JobError("the ranks ended without a result", "their own words are above")
    return code
