"""Step time of the transformer between two emulated hosts whose network is slow, one rank with one thread on each.

    python benchmarks/network.py [--rates 100mbit 1gbit] [--sides none plain ...] [--runs 3] [--options ...] [--json FILE]
                                 [--markdown]

Sides: none (each host trains by itself, both at once: the computation), plain (float32), and one for each compression. As root,
with the programs that ``tests/cluster/cluster`` needs. Runs take turns; with --json they are added to those that FILE has.

What is asked for: plain within 1.15 of the longer one of the computation and the bytes over the speed of the link; bfloat16 at
0.6 of plain, PowerSGD at 0.3. The last column is what a side would be at if its arithmetic and all waiting took no time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from common import report
from common.network import BATCH
from common.runs import BENCHMARKS, ENVIRONMENT, Figures, Run, machine

sys.path.insert(0, str(BENCHMARKS.parent))

from tests.support import hosts

#: options for hvdtrain run
SIDES = {
    "none": (),
    "plain": ("--compression", "none"),
    "bfloat16": ("--compression", "bfloat16"),
    "powersgd": ("--compression", "powersgd:4"),
    "powersgd-64mb": ("--compression", "powersgd:4", "--bucket-mb", "64"),
    "topk": ("--compression", "topk:0.01"),
}
#: of plain's step time over the longer one of computation and network, and of a compression's over plain's
PLAIN_BAR = 1.15
BARS = {"bfloat16": 0.6, "powersgd": 0.3, "powersgd-64mb": 0.3}
PARAMETERS = 12_953_784
#: Bytes of a frame over those that TCP carries in it. The link's counter has messages that are cut into frames further on.
FRAMES = 1514 / 1448
#: The first steps of a run are not counted: connections, first allocations.
WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """One run: the time of each step in seconds, and the bytes that a host sent in one."""

    steps: tuple[float, ...]
    sent: float


def bits(rate: str) -> float:
    """Bits a second of a rate as ``tc`` has it: "100mbit"."""
    for unit, factor in {"mbit": 1e6, "gbit": 1e9}.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    sys.exit(f"--rates: {rate!r} is no rate; for example 100mbit or 1gbit")


def steps_of(side: str, rate: str, seconds: float) -> int:
    """As many as take about ``seconds``, by what they should take."""
    share = {"none": 0.0, "plain": 1.0, "bfloat16": 0.5}.get(side, 0.03)
    expected = max(0.12, share * 4 * PARAMETERS * 8 / bits(rate))
    return WARM_UP + max(5, round(seconds / expected))


@contextmanager
def network(rate: str) -> Iterator[hosts.Cluster]:
    """Two hosts with links of this speed; one user at a time."""
    with open("/run/lock/hvdtrain-cluster", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = hosts.Cluster(2)
        cluster("down")
        try:
            cluster("up", "2", "--rate", rate, "--slots", "1")
            yield cluster
        finally:
            cluster("down")


def measure(cluster: hosts.Cluster, side: str, steps: int, options: Sequence[str]) -> Measured:
    """One run of a side.

    Raises:
        SystemExit: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as name:
        folder = Path(name)
        if side == "none":
            homes = [folder / node for node in cluster.nodes()]
            commands = [(node, _command("train", home, steps, [])) for node, home in zip(cluster.nodes(), homes, strict=True)]
            found = [(home, 0) for home in homes]
        else:
            run = ["run", "-np", "2", "-H", "node1:1,node2:1", "--launcher", "mpirun", "--no-tuned"]
            more = ["--exchange", "horovod", *SIDES[side], *options]
            commands = [("node1", _command(run, folder, steps, more))]
            found = [(folder, 0), (folder, 1)]
        for home, _ in found:
            home.mkdir(exist_ok=True)
        running = [cluster.popen(node, *command, cwd=BENCHMARKS) for node, command in commands]
        for process in running:
            text = process.communicate(timeout=170)[0]
            if process.returncode:
                sys.exit(f"{side} ended with exit code {process.returncode}:\n{text[-3000:]}")
        ends = [json.loads((home / f"rank-{rank}.json").read_text())["ends"] for home, rank in found]
        sent = [json.loads((home / f"sent-{rank}.json").read_text()) for home, rank in found]
    times = [[after - before for before, after in pairwise(each[WARM_UP - 1 :])] for each in ends]
    counts = [(each[-1] - each[WARM_UP - 1]) / (len(each) - WARM_UP) for each in sent]
    return Measured(tuple(map(statistics.fmean, zip(*times, strict=True))), statistics.fmean(counts))


def _command(start: str | Sequence[str], folder: Path, steps: int, more: Sequence[str]) -> list[str]:
    environ = [
        "env",
        f"PYTHONPATH={BENCHMARKS}:{BENCHMARKS.parent}",
        "BENCHMARK_FUSED=0",
        *(f"{name}={value}" for name, value in ENVIRONMENT.items()),
    ]
    start = [start] if isinstance(start, str) else start
    recipe = ["common.network:transformer", "--set", f"folder={folder}", "--max-steps", str(steps)]
    recipe += ["--batch-size-per-rank", str(BATCH), "--save-every", "1000000", "--run-dir", str(folder / "run"), *more]
    return [*environ, sys.executable, "-m", "hvdtrain", *start, *recipe]


def sheet(rate: str, known: Mapping[str, Sequence[Measured]]) -> report.Sheet:
    figures = {side: Figures.of([Run(run.steps, (0.0,)) for run in known[side]]) for side in SIDES if known.get(side)}
    rows = []
    for side, figure in figures.items():
        sent = statistics.median(run.sent for run in known[side])
        link = sent * FRAMES * 8 / bits(rate)
        cells = ["", "", "", "", ""]
        if "none" in figures and side != "none":
            ideal = max(figures["none"].median, link)
            if "plain" in figures:
                cells[4] = f"{ideal / figures['plain'].median:.2f}"
            noise = [figure] if link > figures["none"].median else [figure, figures["none"]]
            cells[0] = f"{figure.median / ideal:.2f}"
            if side == "plain":
                cells[3] = f"<= {PLAIN_BAR}: {_verdict(figure.median / ideal, PLAIN_BAR, noise)}"
        if "plain" in figures and side not in ("none", "plain"):
            medians, fastest = report.ratios(figure, figures["plain"])
            cells[1:3] = f"{medians:.2f}", f"{fastest:.2f}"
            if side in BARS:
                cells[3] = f"<= {BARS[side]}: {_verdict(medians, BARS[side], [figure, figures['plain']])}"
        rows.append((side, *report.times(figure), f"{sent / 1e6:.1f}", f"{link * 1e3:.0f}", *cells))
    columns = ("side", "step ms", "fastest ms", "spread", "MB sent", "link ms")
    columns += ("/ limit", "/ plain", "fastest", "bar", "least / plain")
    runs = min(map(len, known.values()))
    plain = 4 * PARAMETERS / 1e6
    title = (
        f"{rate}, {plain:.1f} MB of gradients (2 (n-1)/n of them are sent: {plain:.1f} MB), {BATCH} sample of 64 words on each of"
        f" 2 hosts; {runs} runs or more; {machine()}"
    )
    return report.Sheet(title, columns, tuple(rows))


def _verdict(ratio: float, bar: float, noise: Sequence[Figures]) -> str:
    kept = report.verdict(ratio, bar, noise)
    return kept if kept == "kept" else f"{kept}, by {ratio / bar - 1:.0%}"


def read(path: Path | None) -> dict[str, dict[str, list[Measured]]]:
    """Runs by rate and side."""
    if path is None or not path.exists():
        return {}
    return {
        rate: {side: [Measured(tuple(run["steps"]), run["sent"]) for run in runs] for side, runs in sides.items()}
        for rate, sides in json.loads(path.read_text())["rates"].items()
    }


def write(path: Path, rates: Mapping[str, Mapping[str, Sequence[Measured]]]) -> None:
    plain = {rate: {side: [asdict(run) for run in runs] for side, runs in sides.items()} for rate, sides in rates.items()}
    path.write_text(json.dumps({"machine": machine(), "rates": plain}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="as tc has them")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["none", "plain", "bfloat16", "powersgd"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one run, without its start; five steps at least")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the last one: more for hvdtrain run")
    parser.add_argument("--json", type=Path, help="add the runs to this file")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    why = hosts.why_not()
    if why and args.runs:
        print(f"benchmarks/network.py measures nothing here: {why}", file=sys.stderr)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are to go with it
    known = read(args.json)
    for rate in args.rates:
        sides = known.setdefault(rate, {})
        if args.runs:
            with network(rate) as cluster:
                for turn in range(args.runs):
                    for side in args.sides if turn % 2 == 0 else reversed(args.sides):
                        run = measure(cluster, side, steps_of(side, rate, args.seconds), args.options)
                        sides.setdefault(side, []).append(run)
                        print(f"{rate}, {side}: {statistics.median(run.steps) * 1e3:.1f} ms", file=sys.stderr, flush=True)
                        if args.json is not None:  # after each run: the others may not come to their end
                            write(args.json, known)
        if sides:
            sheet(rate, sides).show(markdown=args.markdown)


if __name__ == "__main__":
    main()
