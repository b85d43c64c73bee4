"""Sampling beside torch.utils.data.DistributedSampler: time to the first index, peak memory, indices a second.

Each side runs in a process of its own, since the peak memory of a process never falls. Rank 0 of 4, shuffled.
"""

import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

RUNS = 3
READ = 2_000_000  # indices read for the rate
BATCH = 256


def ours(size: int) -> tuple[float, float]:
    from hvdtrain.data.sampler import Sampler, Share

    started = time.perf_counter()
    parts = Sampler(size, 4 * BATCH, seed=1).epoch(0, share=Share.equal(0, 4))
    next(parts)
    first = time.perf_counter() - started
    count, started = 0, time.perf_counter()
    for part in parts:
        count += len(part.indices)
        if count >= READ:
            break
    return first, count / (time.perf_counter() - started)


def torch_sampler(size: int) -> tuple[float, float]:
    from torch.utils.data import DistributedSampler

    started = time.perf_counter()
    indices = iter(DistributedSampler(range(size), num_replicas=4, rank=0, seed=1))
    next(indices)
    first = time.perf_counter() - started
    started = time.perf_counter()
    count = 0
    for count, _ in enumerate(indices, 1):
        if count >= READ:
            break
    return first, count / (time.perf_counter() - started)


SIDES = {"hvdtrain": ours, "torch": torch_sampler}


def child(side: str, size: int) -> None:
    SIDES[side](1000)  # imports and first-call costs are not the sampler's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first, rate = SIDES[side](size)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"first": first, "rate": rate, "peak": peak}))


def main() -> None:
    table = Table(
        "sampler", "samples", "first index (ms)", "peak memory (MB)", "million indices/s", title=f"median of {RUNS} runs"
    )
    medians = {}
    for size in (10**7, 10**12):
        for side in SIDES:
            if side == "torch" and size > 10**8:
                continue  # it would need 10^12 numbers in memory
            runs = []
            for _ in range(RUNS):
                command = [sys.executable, __file__, side, str(size)]
                runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            medians[side, size] = middle
            figures = (f"{middle['first'] * 1e3:,.2f}", f"{middle['peak']:,.1f}", f"{middle['rate'] / 1e6:,.1f}")
            table.add_row(side, f"10^{int(np.log10(size))}", *figures)
    Console().print(table)
    a, b = medians["hvdtrain", 10**7], medians["torch", 10**7]
    print(f"At 10^7: first index {b['first'] / a['first']:,.0f} times sooner, {a['rate'] / b['rate']:.2f} times the indices/s.")


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
