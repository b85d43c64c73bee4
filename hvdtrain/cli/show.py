"""A job that runs, as people see it: what its ranks and its launcher say, on the terminal and in files, and how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hvdtrain import rundir
from hvdtrain.cli.terminal import Terminal
from hvdtrain.errors import JobError
from hvdtrain.launch import Command, Host, Job, frames, output, process, this_host
from hvdtrain.launch.verdict import Verdict, judge
from hvdtrain.launch.watch import Watch

#: Time for a launcher to end the job after a rank has failed, before we end it. MPICH's waits for ranks that never met over MPI.
LAUNCHER_S = 5.0


class Show:
    """Called with every event of a job (``process.Observer``).

    Args:
        log_dir: where each rank has its files, if anywhere.
    """

    def __init__(self, job: Job, watch: Watch, style: output.Style, terminal: Terminal, log_dir: Path | None) -> None:
        self._job, self._watch, self._style, self._terminal = job, watch, style, terminal
        self._files = output.RankFiles(log_dir, job.np) if log_dir is not None else None
        kind = output.Boxes if job.elastic is None else output.Tracebacks
        self._boxes: dict[bool, output.Boxes | output.Tracebacks] = {is_error: kind() for is_error in (False, True)}
        self._strips = {is_error: not os.isatty(2 if is_error else 1) for is_error in (False, True)}

    def __call__(self, event: frames.Event, is_error: bool) -> float | None:
        self._watch.see(event)
        if isinstance(event, frames.Line):
            if self._files is not None:
                self._files.write(event)
            if self._style.shows(event):
                self._say(self._style.render(event, time.time()), event.stream == "err")
        elif isinstance(event, frames.Note):
            self._note(event.text, is_error)
        elif isinstance(event, frames.Started):
            if self._files is not None:
                self._files.start(event.rank)
            misplaced = self._watch.misplaced()
            if misplaced and not _all_here(self._job.hosts):
                raise JobError(f"the ranks are not where they were planned: {misplaced}", "did the launcher read the hosts?")
        return self._time_to_end()

    def _note(self, text: str, is_error: bool) -> None:
        """What launchers say about a failed rank is long, and less than what we know."""
        if self._files is not None:
            self._files.note(text)
        for line in self._boxes[is_error].feed(text) if self._job.tagged else [text]:
            if (not self._watch.any_failed or self._job.elastic is not None) and not output.is_noise(line):
                self._say(line, is_error)

    def _time_to_end(self) -> float | None:
        if self._job.elastic is not None or not (self._watch.any_failed or self._watch.any_told):
            return None
        return LAUNCHER_S if self._watch.any_failed else LAUNCHER_S + self._job.grace_s

    def rest(self, *, is_unexplained: bool) -> None:
        """What was held back of the launcher's, where it is all there is to know."""
        for is_error, box in self._boxes.items():
            for text in [*(box.hidden if is_unexplained else []), *(box.rest() if not self._watch.any_failed else [])]:
                self._say(text, is_error)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _say(self, text: str, is_error: bool) -> None:
        self._terminal.write(click.unstyle(text) if self._strips[is_error] else text, is_error=is_error)


def run(
    started: Command, base: Mapping[str, str], job: Job, style: output.Style, run_dir: Path | None, log_dir: Path | None
) -> Verdict | None:
    """Run the command and show it; how the job failed, or None for one that ended well.

    Raises:
        JobError: the ranks are not where they were planned.
        UsageError: another job writes its files to ``log_dir``.
    """
    watch = Watch(job, rundir.RunDir(run_dir).errors if run_dir is not None else None)
    terminal = Terminal()
    show = Show(job, watch, style, terminal, log_dir)
    option = "--run-dir" if run_dir is not None and log_dir == run_dir / "logs" else "--log-dir"
    with rundir.held(log_dir, "folder for logs", option) if log_dir is not None else contextlib.nullcontext():
        try:
            code = process.run(
                started,
                base,
                show,
                outlet=terminal,
                grace_s=job.grace_s,
                stop_s=job.stop_s,
                on_signal=watch.signalled,
                on_asked=watch.asked,
            )
            failed = judge(code, watch, run_dir)
            show.rest(is_unexplained=failed is not None and not watch.was_signalled and not watch.is_explained)
        finally:
            show.close()
            terminal.finish()
    return failed


def _all_here(hosts: Sequence[Host]) -> bool:
    """Whether all hosts are this machine under several names, as in tests."""
    addresses = this_host.own_addresses()
    return all(this_host.is_here(host.name, addresses) for host in hosts)
