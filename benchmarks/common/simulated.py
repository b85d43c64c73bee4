"""One rank of a job of any size: the real trainer on this process, with a communicator that answers as all ranks would.

What a rank sends, gets and writes hangs on the number of ranks only through the communicator and the sampler, so one process can
count it for thousands of ranks. Nothing here is measured in seconds.
"""

from __future__ import annotations

import math
import pickle
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.comm import Numbers, Op
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.config import Options
from hvdtrain.loggers import Logger
from hvdtrain.loggers.jsonl import JsonLinesLogger
from hvdtrain.progress import HERE
from hvdtrain.recipe import Recipe
from hvdtrain.rundir import RunDir
from hvdtrain.trainer import Trainer
from hvdtrain.world import World

SIZES = (1, 2, 8, 64, 512, 4096)
RANKS_PER_HOST = 8
#: samples of a step on each rank
BATCH = 32
FEATURES, CLASSES = 64, 10

#: Of one run: steps, and how many of them make a window, an evaluation, a checkpoint.
STEPS, LOG_EVERY, EVAL_EVERY, SAVE_EVERY = 40, 10, 20, 20

#: Calls whose number hangs on time: a vote about once a second, and a poll of the disk every two.
BY_TIME = ("stop/votes", "checkpoint/written")


@dataclass(frozen=True)
class Call:
    """A collective of one rank: in which phase (``hvdtrain.progress``), the bytes that it brings and the bytes that it gets."""

    phase: str
    kind: str
    name: str
    sent: int
    got: int


class Simulated(LocalCommunicator):
    """Rank ``rank`` of ``size``, where every rank brings what this one brings; but the hosts have names of their own.

    A broadcast gives what this rank brings, as from a root that stands where it stands. What is gathered is unpickled as often
    as there are ranks: the time and the memory of that are real.
    """

    def __init__(self, size: int, rank: int) -> None:
        hosts = tuple(f"node{number // RANKS_PER_HOST:04}" for number in range(size))
        HERE.enter("connecting the ranks")
        object.__setattr__(self, "calls", [])
        object.__setattr__(self, "_hosts", hosts)
        named = self.allgather(socket.gethostname(), name="hosts")  # as the real communicators do
        super().__init__(World(rank, size).with_hosts(named))

    def allreduce(self, values: Numbers, *, name: str, op: Op = "sum") -> NDArray[np.float64]:
        mine = np.array(values, dtype=np.float64)
        self._note("allreduce", name, mine.nbytes, mine.nbytes)
        return mine * self.world.size if op == "sum" else mine

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        size = len(pickle.dumps(value))
        self._note("broadcast", name, size, size)
        return value

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        hosts = self._hosts
        texts = [pickle.dumps(host) for host in hosts] if value == socket.gethostname() else [pickle.dumps(value)] * len(hosts)
        self._note("allgather", name, len(texts[0]), sum(map(len, texts)))
        return list(map(pickle.loads, texts))

    def _note(self, kind: str, name: str, sent: int, got: int) -> None:
        self.calls.append(Call(HERE.phase, kind, name, sent, got))


class Numbered:
    """``count`` samples that are functions of their numbers, so that as many as wanted take no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def take(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return np.sin(np.outer(indices % 1009, np.arange(1, FEATURES + 1))).astype(np.float32), indices % CLASSES


@dataclass(frozen=True)
class Seen:
    """What one rank of a run called, and the files below its run directory with their bytes."""

    calls: tuple[Call, ...]
    files: Mapping[str, int]

    def of(self, name: str, phase: str | None = None) -> list[Call]:
        return [call for call in self.calls if call.name == name and phase in (None, call.phase)]

    def bytes_below(self, start: str) -> int:
        return sum(size for name, size in self.files.items() if name.startswith(start))


def train(size: int, rank: int, folder: Path, *, curves: bool = False) -> Seen:
    """A run of ``STEPS`` steps as rank ``rank`` of ``size``; its batches grow with the ranks. ``curves``: TensorBoard's file, too."""
    comm = Simulated(size, rank)
    recipe = Recipe(
        adapter=LinearAdapter(FEATURES, CLASSES),
        train=Numbered(STEPS * BATCH * size),
        valid=Numbered(BATCH * size),
        batch_size=BATCH,
        epochs=1,
    )
    options = Options(
        batch_size_per_rank=BATCH,
        log_every=LOG_EVERY,
        eval_every=EVAL_EVERY,
        save_every=SAVE_EVERY,
        loader_workers="0",
        prefetch="0",
    )
    run_dir = RunDir(folder)
    trainer = Trainer(recipe, comm, options=options, run_dir=run_dir)
    trainer.prepare()
    loggers: list[Logger] = []
    if comm.world.is_primary:
        loggers.append(JsonLinesLogger(run_dir.metrics_jsonl))
        if curves:
            with suppress(ImportError):
                from hvdtrain.loggers.tensorboard import TensorBoardLogger

                loggers.append(TensorBoardLogger(run_dir.tensorboard))
    trainer.fit(loggers)
    for logger in loggers:
        logger.close()
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return Seen(tuple(comm.calls), files)


def growth(values: Mapping[int, float], *, tolerance: float = 1.25) -> str:
    """How ``values`` grow with the number of ranks, which is the key: "flat", "log n", "linear" or "more than linear".

    A single rank is left out: it has nobody to talk to. ``tolerance`` is on the ratio of the largest number of ranks to the
    smallest one, for digits of numbers that are printed, and for noise. More than linear is looked for from each number of ranks
    to the next: what is constant hides it over all of them.
    """
    several = {size: value for size, value in values.items() if size > 1}
    first, last = min(several), max(several)
    if any(several[b] > tolerance * b / a * several[a] for a, b in pairwise(sorted(several))):
        return "more than linear"
    ratio = several[last] / several[first] if several[first] else 1.0
    if ratio <= tolerance:
        return "flat"
    return "log n" if ratio <= tolerance * rounds(last) / rounds(first) else "linear"


def rounds(size: int) -> int:
    """Messages one after the other of a collective in which the ranks that know each other's numbers double each time."""
    return math.ceil(math.log2(size)) if size > 1 else 0


def model_s(call: Call, size: int, latency_s: float, byte_s: float) -> float:
    """Seconds of ``call`` on ``size`` ranks: each round has the latency, and carries the bytes that it must.

    As in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005: recursive
    doubling for an allreduce, a tree for a broadcast, and for an allgather of objects two exchanges, of lengths and of bytes.
    """
    if call.kind == "allgather":
        return 2 * rounds(size) * latency_s + call.got * byte_s
    return rounds(size) * (latency_s + call.got * byte_s)


def names(seen: Sequence[Seen]) -> list[tuple[str, str, str]]:
    """Phase, kind and name of all calls, in the order in which they came first."""
    return list(dict.fromkeys((call.phase, call.kind, call.name) for each in seen for call in each.calls))
