"""Samples a second in each way of loading, and the memory of two ranks with a copy each and with one for both.

python benchmarks/loader.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from hvdtrain.data import workers
from hvdtrain.data.cache import cached
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.sources import Source, as_source

ROOT = Path(__file__).parents[1]
SAMPLES, WIDTH, BATCH, ROUNDS = 2048, 1024, 32, 3
#: of the data whose memory is measured: 128 MB
WIDE = 16 * WIDTH
#: of a step that only waits, as one on an accelerator does
STEP_S = 0.004


class Slow:
    """Samples that Python makes (about 0.1 ms each), or waits for."""

    def __init__(self, rounds: int = 0, seconds: float = 0.0, width: int = WIDTH) -> None:
        self.rounds, self.seconds, self.width = rounds, seconds, width

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        for _ in range(self.rounds):
            pass
        if self.seconds:
            time.sleep(self.seconds)
        return np.full(self.width, index, np.float32), index


DATA = {
    "arrays": lambda: (np.zeros((SAMPLES, WIDTH), np.float32), np.arange(SAMPLES)),
    "Python works": lambda: Slow(rounds=5000),
    "Python waits": lambda: Slow(seconds=0.0005),
}
WAYS = {"in the step": (0, 0), "thread": (2, 0), "2 processes": (2, 2)}


@contextmanager
def passes(source: Source, prefetch: int, count: int) -> Iterator[Any]:
    """A function that goes through the data once; processes are started before it is called."""
    loader = Loader(source, Sampler(SAMPLES, BATCH), prefetch=prefetch)
    if not count:
        yield lambda epoch: loader.epoch(epoch)
        return
    with closing(workers.start(source, loader.sampler, loader.share, count)) as pool:
        while not pool.is_ready():
            time.sleep(0.01)
        yield lambda epoch: loader.by(pool, epoch, loader.sampler.epoch(epoch), prefetch)


def rate(batches: Any) -> float:
    began = time.perf_counter()
    for _ in batches:
        time.sleep(STEP_S)
    return SAMPLES / (time.perf_counter() - began)


def memory(kind: str, out: Path) -> None:
    """One of two ranks: its data in memory, and what it takes (PSS counts shared pages by halves)."""
    from hvdtrain.comm.connect import connect
    from hvdtrain.world import World

    comm = connect(World.from_env(), "numpy")
    before = psutil.Process().memory_full_info().pss
    data, indices = Slow(width=WIDE), np.arange(SAMPLES)
    held = cached(data).on_host(comm) if kind == "shared" else as_source(_copied(data))
    sampler = Sampler(SAMPLES, BATCH)
    for _ in Loader(held, sampler, Share.equal(comm.world.rank, comm.world.size), prefetch=0).epoch(0):
        pass
    for start in range(0, SAMPLES, BATCH):  # every rank has seen all pages
        held.take(indices[start : start + BATCH])
    comm.allgather(None, name="all have read")
    (out / f"{kind}-{comm.world.rank}").write_text(json.dumps(psutil.Process().memory_full_info().pss - before))
    comm.allgather(None, name="all are measured")


def _copied(data: Slow) -> tuple[Any, Any]:
    inputs, targets = np.empty((SAMPLES, data.width), np.float32), np.empty(SAMPLES, np.int64)
    for index in range(SAMPLES):
        inputs[index], targets[index] = data[index]
    return inputs, targets


def main() -> None:
    table = Table("data", *WAYS, title=f"samples/s, median of {ROUNDS} (fastest), a step waits {STEP_S * 1e3:g} ms for {BATCH}")
    for name, make in DATA.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for epoch in range(ROUNDS):
            for way, (prefetch, count) in WAYS.items():
                with passes(as_source(make()), prefetch, count) as go:
                    found[way].append(rate(go(epoch)))
        table.add_row(name, *(f"{statistics.median(rates):,.0f} ({max(rates):,.0f})" for rates in found.values()))
    Console(width=110).print(table)
    with tempfile.TemporaryDirectory() as out:
        for kind in ("private", "shared"):
            command = ["run", "-np", "2", "-H", "localhost:2", "--launcher", "mpirun", "--"]
            own = [sys.executable, str(Path(__file__).resolve()), kind, out]
            subprocess.run([sys.executable, "-m", "hvdtrain", *command, *own], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            total = sum(json.loads((Path(out) / f"{kind}-{rank}").read_text()) for rank in range(2))
            print(f"{kind}: {total / (1 << 20):.1f} MB for two ranks, of {SAMPLES * WIDE * 4 / (1 << 20):.1f} MB of data")


if __name__ == "__main__":
    memory(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else main()
