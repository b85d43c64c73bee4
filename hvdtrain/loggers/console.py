"""Progress for people: a live line on a terminal, plain lines through a pipe (a launcher is one)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hvdtrain.state import TrainState

_PLAIN_EVERY_S = 2.0
#: of the time, that ranks may wait for data before it is said
_MUCH_WAIT = 0.1
#: and how long: windows in a row, and steps from the start, while the fastest way to load is looked for
_WAITING_WINDOWS, _SEARCH_STEPS = 3, 100


class ConsoleLogger:
    """Shows step, epoch, figures, samples/s and the time left.

    Args:
        total_steps: steps at the end of the run.
        total_epochs: epochs at the end of the run.
        first_step: steps that were done before this run (when it resumes).
        live: whether the process has its terminal for itself. A launcher may give its ranks a terminal that it reads.
    """

    def __init__(self, total_steps: int, total_epochs: int, first_step: int = 0, *, live: bool = True) -> None:
        self._total_steps, self._total_epochs, self._first_step = total_steps, total_epochs, first_step
        self._started = self._printed = time.monotonic()
        self._values: dict[str, float] = {}
        self._evaluated: int | None = None  # the step of the validation figures
        self._waits = 0  # windows in a row in which ranks waited much for data; it is said once
        self._line = ""  # the newest line, not printed yet
        self._progress: Progress | None = None
        console = Console()
        if live and console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),  # names like f1[macro]
                console=console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        self._values |= values
        wait = self._values.pop("speed/data_wait", 0.0)
        if "speed/data_wait" in values and state.step >= self._first_step + _SEARCH_STEPS:
            self._look_at(wait)
        if any(name.startswith("valid/") for name in values):
            self._evaluated = state.step
        epoch = state.epoch + (1 if state.position else 0)
        figures = "  ".join(_figure(name, value) for name, value in self._values.items())
        older = f" (of step {self._evaluated})" if self._evaluated not in (None, state.step) else ""
        text = f"epoch {epoch}/{self._total_epochs}  {figures}{older}"
        if self._progress is not None:
            self._progress.update(self._task, completed=state.step, description=text)
            return
        self._line = f"step {state.step}/{self._total_steps}  {text}  left {self._left(state.step)}"
        if time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._print()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._print()

    def _look_at(self, wait: float) -> None:
        """Say once that loading holds the training up."""
        if self._waits < _WAITING_WINDOWS:
            self._waits = self._waits + 1 if wait > _MUCH_WAIT else 0
            if self._waits == _WAITING_WINDOWS:
                say(
                    f"Warning: {wait:.0%} of the time is waiting for data. What helps: more --loader-workers, cheaper samples, "
                    "or hvdtrain.data.cache.cached(dataset), which reads each once (docs/loading.md)"
                )

    def _print(self) -> None:
        say(self._line)
        self._line, self._printed = "", time.monotonic()

    def _left(self, step: int) -> str:
        done = max(step - self._first_step, 1)
        seconds = round((time.monotonic() - self._started) / done * (self._total_steps - step))
        return (
            f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            if seconds >= 3600
            else f"{seconds // 60}:{seconds % 60:02}"
        )


def say(text: str, *, dim: bool = False) -> None:
    """Print a line; ``dim`` is seen on a terminal only.

    Output that nobody reads any more (``| head``), a closed one or a full disk must not end a training.
    """
    if not text:
        return
    try:
        text = f"\033[2m{text}\033[0m" if dim and sys.stdout.isatty() else text
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:
        sys.stdout.write(text.encode("ascii", "replace").decode() + "\n")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass


def say_aside(text: str) -> None:
    """Print a line that few need to read: dim on a terminal."""
    say(text, dim=True)


def _figure(name: str, value: float) -> str:
    name = name.removeprefix("train/")
    if name.endswith("samples_per_s"):
        return f"{value:,.0f} samples/s"
    return f"{name} {value:.4g}"
