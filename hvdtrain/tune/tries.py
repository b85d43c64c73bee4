"""One try: a short job of the user's recipe, started as ``hvdtrain run`` starts it, that times the step."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hvdtrain.bench import events, job, step
from hvdtrain.bench.child import started
from hvdtrain.bench.events import Finished
from hvdtrain.bench.recipes import Wish
from hvdtrain.bench.results import Steps
from hvdtrain.tune import space
from hvdtrain.tune.search import ENGINE, Ask, Failed, Measured

#: What of a job's words is looked through for the reason why it failed.
_LAST_LINES = 200
_WHO = re.compile(r"^rank \d+ on \S+ failed first(?: in phase '[^']*')?: ")


@dataclass(frozen=True)
class Job:
    """What all tries have in common.

    Attributes:
        where: options of ``hvdtrain run``.
        variables: of the ranks, as they would have them in a training run.
        seconds: of steps in each try.
    """

    wish: Wish
    where: tuple[str, ...]
    variables: Mapping[str, str]
    seconds: float

    def argv(self, ask: Ask) -> tuple[str, ...]:
        """The command of one try."""
        options = space.options_of(ask.settings)
        exchange = options.pop(space.OPTIONS[ENGINE], self.wish.options.get("exchange", "auto"))
        wish = replace(self.wish, options={**self.wish.options, **options})
        plan = step.Plan(wish, str(exchange), self.seconds)
        variables = {**self.variables, **space.variables_of(ask.settings)}
        python = (sys.executable, "-P", "-m")
        words = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return (
            *(*python, "hvdtrain", "run", "--no-prefix", *self.where, *words, "--"),
            *(*python, "hvdtrain.bench.job", *job.argv("step", plan)),
        )


def run(argv: Sequence[str], limit_s: float) -> Measured | Failed:
    """Start a try, and wait for its end or end it."""
    began = time.monotonic()
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    found: Steps | None = None
    with started(argv, apart=True) as child, _ended_after(child, limit_s) as over:
        assert child.stdout is not None
        for line in child.stdout:
            event = events.decode(line.rstrip("\n"))
            if isinstance(event, Finished) and isinstance(event.report, Steps):
                found = event.report
            elif event is None:
                lines.append(line.rstrip("\n"))
        code = child.wait()
    took_s = time.monotonic() - began
    if over.is_set():
        return Failed(f"its job had not ended after {limit_s:.0f} s", took_s)
    if code or found is None:
        return Failed(reason(lines, code), took_s)
    one = found.steps[0]
    return Measured(one.step.median_s, took_s, engine(one.chosen), one.step.noise)


def engine(chosen: str) -> str:
    """Which engine it is that the adapter tells of, whose words begin with it; empty if it tells of none."""
    return next((name for name in ("shared", "horovod") if chosen.startswith(name)), "")


def reason(lines: Sequence[str], code: int) -> str:
    """Why a job failed, of what it said: its last error, else its last words. Which rank was first to say so is left out."""
    errors = [_WHO.sub("", line.partition("Error: ")[2]) for line in lines if line.startswith("Error: ")]
    words = [line.strip() for line in lines if line.strip()]
    return (errors or words or [f"its job ended with exit code {code}"])[-1]


@contextmanager
def _ended_after(child: subprocess.Popen[str], limit_s: float) -> Iterator[threading.Event]:
    """While this is open: SIGTERM for the child when time is up. The event tells that it was."""
    over = threading.Event()

    def end() -> None:
        over.set()
        child.terminate()

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()
