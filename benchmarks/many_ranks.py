"""What grows with the number of ranks, from 1 to 4,096, counted in a simulation on this machine.

    python benchmarks/many_ranks.py [--latency-us US --byte-ns NS] [--markdown]

The real trainer runs as one rank of n, over a communicator that answers as n equal ranks would and counts calls and bytes. Times of
what a rank or the launching side computes by itself are measured; those of messages are a model: log2(n) rounds with the latency
between two real ranks of this host over MPI, which is measured first. For another network give its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from common import simulated
from common.report import Sheet
from common.simulated import BATCH, RANKS_PER_HOST, SIZES, Numbered, Seen, Simulated, growth, rounds

from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.comm.connect import connect
from hvdtrain.config import Options
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.launch import Host, Job, detect, fit, frames, hostfile, place, relay, start_argv
from hvdtrain.launch.frames import Decoder
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.mpirun import OpenMpi
from hvdtrain.launch.output import RankFiles
from hvdtrain.launch.watch import Watch
from hvdtrain.place import Place
from hvdtrain.recipe import Recipe
from hvdtrain.world import World

#: Samples of the data set whose order is sampled.
SAMPLES = 10**9
#: How often each time is taken; the fastest counts.
TRIES = 3
#: Times that differ by no more than this count as equal.
NOISE = 2.0
#: Phase of the trainer -> what it belongs to, and how often that came in the run. All others are the set-up.
EVENTS = {
    "training step": ("step", simulated.STEPS),
    "metrics reduction": ("window", simulated.STEPS // simulated.LOG_EVERY),
    "evaluation": ("evaluation", simulated.STEPS // simulated.EVAL_EVERY),
    "comparing the ranks' weights": ("checkpoint", simulated.STEPS // simulated.SAVE_EVERY),
    "saving a checkpoint": ("checkpoint", simulated.STEPS // simulated.SAVE_EVERY),
    "waiting for the last checkpoint": ("end", 1),
}
COLUMNS = tuple(f"{size:,}" for size in SIZES)


def ping(path: Path) -> None:
    """As one of two ranks: a reduction of a number and one of 1 MiB; the primary writes seconds, and seconds a byte."""
    comm = connect(World.from_env(), "numpy")

    def seconds(values: np.ndarray, times: int) -> float:
        return fastest(lambda: [comm.allreduce(values, name="ping") for _ in range(times)]) / times

    small, large = seconds(np.ones(1), 1000), seconds(np.ones(1 << 17), 20)
    if comm.world.is_primary:
        path.write_text(json.dumps([small, max(large - small, 0.0) / (8 << 17)]))
    comm.close()


def measure_network() -> tuple[float, float]:
    """Latency in seconds, and seconds a byte, of a reduction between two ranks of this host."""
    found = detect.look(os.environ)
    if found.mpi is None:
        sys.exit(
            "benchmarks/many_ranks.py needs mpirun to measure a latency (pip install openmpi), or --latency-us and --byte-ns"
        )
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if found.mpi.kind == "openmpi" else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ping.json"
        subprocess.run([found.mpi.mpirun, *options, "-np", "2", sys.executable, __file__, "--ping", str(path)], check=True)
        latency_s, byte_s = json.loads(path.read_text())
    return latency_s, byte_s


def fastest(action: Callable[[], object]) -> float:
    """Seconds of ``action``."""
    found = []
    for _ in range(TRIES):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return min(found)


def peak_kb(action: Callable[[], object]) -> float:
    """Memory that ``action`` needs at most, in KB."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def row(name: str, values: Mapping[int, float], form: str, *, tolerance: float = NOISE, note: str = "") -> tuple[str, ...]:
    return (name, *(form.format(values[size]) for size in SIZES), growth(values, tolerance=tolerance) + note)


def by_size(function: Callable[[int], float]) -> dict[int, float]:
    return {size: function(size) for size in SIZES}


# --- one rank's own work -----------------------------------------------------------------------------------------------------


def _share(size: int) -> Share:
    return Share.equal(size - 1, size)


def _slices(size: int, count: int) -> int:
    parts = Sampler(SAMPLES, BATCH * size, seed=1).epoch(0, 0, _share(size))
    return sum(len(part.indices) for part, _ in zip(parts, range(count), strict=False))


def _place(size: int, **options: object) -> Place:
    data = Numbered(BATCH * size)
    recipe = Recipe(adapter=LinearAdapter(simulated.FEATURES, simulated.CLASSES), train=data, batch_size=BATCH, epochs=1)
    return Place.of(recipe, data, None, Options(batch_size_per_rank=BATCH, **options), World(size - 1, size))  # type: ignore[arg-type]


def own_work() -> Sheet:
    """The sampler's, and that of meeting: time and memory of the last rank."""
    comms = {size: Simulated(size, size - 1) for size in SIZES}
    places = {size: _place(size) for size in SIZES}
    weighted = {size: _place(size, share="node0000=2") for size in SIZES}
    slices = 1000
    rows = (
        row("sampler: first slice (us)", by_size(lambda n: 1e6 * fastest(lambda: _slices(n, 1))), "{:.0f}"),
        row("sampler: a slice (us)", by_size(lambda n: 1e6 * fastest(lambda: _slices(n, slices)) / slices), "{:.2f}"),
        row("sampler: memory (KB)", by_size(lambda n: peak_kb(lambda: _slices(n, slices))), "{:.0f}"),
        row(
            "set-up: ranks meet (ms)",
            by_size(lambda n: 1e3 * fastest(lambda: places[n].meet(comms[n]))),
            "{:.2f}",
            note=", once",
        ),
        row(
            "set-up: with --share (ms)",
            by_size(lambda n: 1e3 * fastest(lambda: weighted[n].meet(comms[n]))),
            "{:.2f}",
            note=", once",
        ),
        row("set-up: memory (KB)", by_size(lambda n: peak_kb(lambda: places[n].meet(comms[n]))), "{:.0f}", note=", once"),
    )
    title = f"A rank's own work: {SAMPLES:.0e} samples, {BATCH} a rank and step; times are the fastest of {TRIES}"
    return Sheet(title, ("ranks", *COLUMNS, "grows"), rows)


# --- what the ranks say to each other ------------------------------------------------------------------------------------------


def runs() -> dict[int, tuple[Seen, Seen]]:
    """The first and the last rank of each number of them."""
    found = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as last:
            found[size] = (simulated.train(size, 0, Path(first), curves=True), simulated.train(size, size - 1, Path(last)))
    return found


def collectives(found: Mapping[int, tuple[Seen, Seen]], latency_s: float, byte_s: float) -> Sheet:
    """Each collective of the last rank: how often, with how many bytes, and what the model says that it takes."""
    last = {size: seen for size, (_, seen) in found.items()}
    rows = []
    for phase, kind, name in simulated.names([last[SIZES[-1]]]):
        event, times = EVENTS.get(phase, ("set-up", 1))
        calls = {size: last[size].of(name, phase) for size in SIZES if size > 1}
        got = {size: float(each[0].got) for size, each in calls.items()}
        how = growth(got)
        once = "" if event in ("step", "window", "evaluation", "checkpoint") else ", once"
        often = "about 1 a s" if name in simulated.BY_TIME and event == "step" else f"{len(calls[SIZES[-1]]) / times:g}"
        models = [simulated.model_s(calls[size][0], size, latency_s, byte_s) * 1e6 for size in (64, SIZES[-1])]
        sizes = (f"{got[size]:,.0f}" for size in (2, 64, SIZES[-1]))
        rows.append((event, f"{kind} {name}", often, *sizes, how + once, *(f"{model:,.0f}" for model in models)))
    title = f"Collectives of the trainer. The times (us) are a model: {latency_s * 1e6:.1f} us a round, {byte_s * 1e9:.2f} ns a byte"
    return Sheet(
        title,
        ("of a", "call", "calls each", "bytes at 2", "at 64", "at 4,096", "bytes grow", "us at 64", "at 4,096"),
        tuple(rows),
    )


def written(found: Mapping[int, tuple[Seen, Seen]]) -> Sheet:
    """Bytes in files: of the primary for each window and checkpoint, and of the last rank."""
    windows, saves = (EVENTS[phase][1] for phase in ("metrics reduction", "saving a checkpoint"))
    evaluations = EVENTS["evaluation"][1]
    first = {size: seen for size, (seen, _) in found.items()}
    rows = [
        row(name, by_size(lambda n, start=start, per=per: first[n].bytes_below(start) / per), "{:,.0f}", tolerance=1.25)
        for name, start, per in (
            ("metrics.jsonl, a line", "metrics.jsonl", windows + evaluations),
            ("TensorBoard, a line", "tensorboard", windows + evaluations),
            ("a checkpoint", "checkpoints", saves),
        )
    ]
    rows.append(row("all of the last rank", by_size(lambda n: found[n][1].bytes_below("") if n > 1 else 0), "{:,.0f}"))
    return Sheet("Bytes written by the primary, and by the last rank", ("ranks", *COLUMNS, "grows"), tuple(rows))


def latencies(latency_s: float, byte_s: float, found: Mapping[int, tuple[Seen, Seen]]) -> Sheet:
    """The model's time of all that the ranks say to each other for one window, evaluation and checkpoint, gradients left out."""

    def total(event: str, size: int) -> float:
        phases = [phase for phase, (of, _) in EVENTS.items() if of == event]
        times = EVENTS[phases[0]][1]
        calls = [call for call in found[size][1].calls if call.phase in phases]
        return 1e6 * sum(simulated.model_s(call, size, latency_s, byte_s) for call in calls) / times

    rows = [
        row(f"{event} (us)", by_size(lambda n, event=event: total(event, n)), "{:.0f}")
        for event in ("window", "evaluation", "checkpoint")
    ]
    rows.append(row("rounds of messages", by_size(rounds), "{:.0f}"))
    return Sheet("Model: time in collectives", ("ranks", *COLUMNS, "grows"), tuple(rows))


# --- the launching side ----------------------------------------------------------------------------------------------------------


def _hosts(size: int) -> str:
    return "".join(f"node{number:04} slots={min(RANKS_PER_HOST, size)}\n" for number in range(-(-size // RANKS_PER_HOST)))


def _job(size: int) -> Job:
    hosts: tuple[Host, ...] = fit(hostfile.parse(_hosts(size)).hosts, size, source="hosts")
    job = Job(("python", "-m", "hvdtrain", "train", "recipe.py"), hosts, size, cwd="/home/user", launch_dir="/home/user/run")
    return relay.wrap(job, start=start_argv("python"))


def _command_bytes(size: int) -> float:
    command = OpenMpi(Mpi("openmpi", (4, 1, 6), "mpirun")).command(_job(size))
    return sum(len(word) + 1 for word in command.argv)


def _output(size: int) -> bytes:
    """Every rank starts, says one line and ends."""
    parts = []
    for rank in range(size):
        host = f"node{rank // RANKS_PER_HOST:04}"
        parts += [*frames.encode(rank, host, "s", ""), *frames.encode(rank, host, "o", "a line of output")]
        parts += frames.encode_ended(rank, host, {"code": 0})
    return b"".join(parts)


def _hear(size: int, output: bytes, folder: Path | None) -> None:
    decoder, watch = Decoder(), Watch(_job(size))
    files = RankFiles(folder, size) if folder else None
    for start in range(0, len(output), 4096):
        for event in decoder.feed(output[start : start + 4096]):
            watch.see(event)
            if files is not None and isinstance(event, frames.Line):
                files.write(event)
    if files is not None:
        files.close()


def launching() -> Sheet:
    """From a hostfile to a command, and the output of all ranks: the launching side has a line for each host and rank."""
    outputs = {size: _output(size) for size in SIZES}

    def heard(size: int, *, write: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return 1e6 * fastest(lambda: _hear(size, outputs[size], Path(folder) if write else None)) / size

    rows = (
        row("hostfile to command (ms)", by_size(lambda n: 1e3 * fastest(lambda: _command_bytes(n))), "{:.2f}", note=", once"),
        row("bytes of the command", by_size(_command_bytes), "{:,.0f}", tolerance=1.25, note=", once"),
        row(
            "places of all ranks (ms)", by_size(lambda n: 1e3 * fastest(lambda: place(_job(n).hosts))), "{:.2f}", note=", once"
        ),
        row("start, line and end of a rank (us)", by_size(lambda n: heard(n, write=False)), "{:.0f}", note=" a rank"),
        row("the same with its files (us)", by_size(lambda n: heard(n, write=True)), "{:.0f}", note=" a rank"),
    )
    title = f"The launching side: {RANKS_PER_HOST} ranks a host; times are the fastest of {TRIES}"
    return Sheet(title, ("ranks", *COLUMNS, "grows"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ping", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--latency-us", type=float, help="of a message, instead of the one between two ranks of this host")
    parser.add_argument("--byte-ns", type=float, help="nanoseconds a byte, likewise")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    if args.ping is not None:
        ping(args.ping)
        return
    known = args.latency_us is not None and args.byte_ns is not None
    measured = (0.0, 0.0) if known else measure_network()
    latency_s = measured[0] if args.latency_us is None else args.latency_us * 1e-6
    byte_s = measured[1] if args.byte_ns is None else args.byte_ns * 1e-9
    found = runs()
    sheets: Sequence[Sheet] = (
        own_work(),
        collectives(found, latency_s, byte_s),
        latencies(latency_s, byte_s, found),
        written(found),
        launching(),
    )
    for sheet in sheets:
        sheet.show(markdown=args.markdown)


if __name__ == "__main__":
    main()
