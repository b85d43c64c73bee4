"""``hvdtrain horovod install | status | uninstall``."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvdtrain.horovod.install import Options, Reporter, install, make_plan, uninstall
from hvdtrain.horovod.plan import describe
from hvdtrain.horovod.status import Status, collect


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Install, check or remove Horovod for the installed frameworks.

    Horovod's last release does not compile against current PyTorch and TensorFlow; 'install' changes what stands in the
    way, builds it for the frameworks that are installed here, proves that it works, and keeps the wheel for next time.
    """


@command.command("install")
@click.option(
    "-j", "--jobs", type=click.IntRange(1), help="Compiler processes to run at once (default: CPUs, as memory allows)."
)
@click.option("--gpu", type=click.Choice(["auto", "off"]), default="auto", show_default=True, help="GPU options.")
@click.option("--rebuild", is_flag=True, help="Build even if a wheel is cached or Horovod is installed already.")
@click.option("--verify/--no-verify", default=None, help="Train two ranks for each framework (default: after a build).")
@click.option("--dry-run", is_flag=True, help="Say what would be built, and stop.")
def install_command(jobs: int | None, gpu: str, rebuild: bool, verify: bool | None, dry_run: bool) -> None:
    """Build Horovod for the installed frameworks, or take it from the cache, and verify it."""
    options = Options(jobs=jobs, rebuild=rebuild, gpu=gpu == "auto", verify=verify)
    with _reporter() as reporter, _terminate_like_interrupt():
        if dry_run:
            plan = make_plan(options, reporter)
            for line in [*describe(plan), f"Key: {plan.key}"]:
                reporter.say(line)
            return
        outcome = install(options, reporter)
    names = " and ".join(outcome.plan.names)
    click.secho(f"Horovod works with {names}: {outcome.action}, {outcome.seconds:.0f} s", fg="green")


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(as_json: bool) -> int:
    """Show what is installed, what it was built for, and what is wrong. Exit code 1 on a problem."""
    state = collect()
    if as_json:
        click.echo(json.dumps(asdict(state) | {"ok": state.ok}, indent=2))
    else:
        _print_status(state)
    return 0 if state.ok else 1


@command.command("uninstall")
@click.option("--cache", is_flag=True, help="Also empty the cache of built wheels, source and logs.")
def uninstall_command(cache: bool) -> None:
    """Remove Horovod from this environment."""
    for line in uninstall(with_cache=cache):
        click.echo(line)


def _print_status(state: Status) -> None:
    console = Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    built = f" (built for Python {state.built.python} by {state.built.compiler})" if state.built and state.built.ours else ""
    rows = [
        ("Horovod", f"{state.horovod or 'not installed'}{built}"),
        ("Python", state.python),
        ("MPI", state.mpi or "no"),
        ("Gloo", "yes" if state.gloo else "no"),
        ("NCCL", state.nccl or "no"),
        ("mpirun", state.mpirun or "not found"),
        ("mpi4py", state.mpi4py or "not installed"),
    ]
    for name, value in rows:
        facts.add_row(f"[bold]{name}[/bold]", value)
    console.print(facts)
    if state.frameworks:
        table = Table("Framework", "Installed", "Horovod built for", "Loads")
        for framework in state.frameworks:
            loads = "[green]yes[/green]" if framework.loads else "[red]no[/red]"
            table.add_row(framework.name, framework.installed or "-", framework.built_for or "-", loads)
        console.print(table)
    for problem in state.problems:
        console.print(f"[red]Problem:[/red] {problem.what}", soft_wrap=True)
        console.print(f"  Mend it with: [bold]{problem.mend}[/bold]", soft_wrap=True)


class _Bar:
    """Live progress on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def stage(self, text: str) -> None:
        # a new total hides the percentage until the stage has one; the elapsed time goes on
        self._progress.update(self._task, description=text, total=None, completed=0)

    def percent(self, value: int) -> None:
        self._progress.update(self._task, total=100, completed=value)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True, markup=False)


class _Lines:
    """Plain lines where there is no terminal: each stage, and every tenth per cent of it."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._shown = 0

    def stage(self, text: str) -> None:
        self._shown = 0
        self._print(text)

    def percent(self, value: int) -> None:
        if value // 10 > self._shown:
            self._shown = value // 10
            self._print(f"{value} %")

    def say(self, text: str) -> None:
        click.echo(text)

    def _print(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        click.echo(f"[{minutes}:{seconds:02}] {text}")


@contextmanager
def _reporter() -> Iterator[Reporter]:
    console = Console(highlight=False)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM cleans up as Ctrl-C does, so that a batch system leaves nothing half-done either."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
