"""Pipelines: peak memory of each rank, and step time beside what the simulator says.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py memory [--stages 1 2 4] [--runs 3]
    python benchmarks/pipeline.py time [--rates none 1gbit] [--schedules gpipe 1f1b] [--runs 3] [--json FILE]

memory: a transformer of 200 million parameters with Adam, one sequence a micro-batch; asked for: with 4 stages, each rank holds
at most 40 % of what one process does.

time: a transformer on 2 ranks with one thread each, on this host and over an emulated network (as root). In steps of their own,
each stage's forward and backward passes, its update, and messages of its activations are timed; the simulator puts them together,
with the bubble. Asked for: real steps within 15 % of that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.runs import BENCHMARKS, ENVIRONMENT

sys.path.insert(0, str(BENCHMARKS.parent))

MEMORY_BAR, TIME_BAR = 0.40, 0.15
#: width and blocks: 12 * width ** 2 parameters in each
LARGE, SMALL = (1024, 16), (256, 8)
LENGTH = 64
MICROS, MICRO_SIZE = 8, 4


def pipeline(width: int, blocks: int) -> Any:
    import torch
    import torch.nn.functional as F

    from examples.torch_gpt import Block, Embedding
    from hvdtrain.adapters.torch_pipeline import TorchPipeline

    torch.manual_seed(0)
    layers = [
        lambda: Embedding(width, LENGTH),
        *[lambda: Block(width, width // 64) for _ in range(blocks)],
        lambda: torch.nn.Linear(width, 128),
    ]
    return TorchPipeline(
        layers,
        lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


def batch(samples: int) -> tuple[Any, Any]:
    letters = np.random.default_rng(0).integers(0, 128, (samples, LENGTH + 1))
    return letters[:, :-1].copy(), letters[:, 1:].copy()


def rank(what: str, options: dict[str, Any], out: Path) -> None:
    """As one rank: measure, and write the figures."""
    from hvdtrain.comm.connect import connect
    from hvdtrain.pipeline.wanted import Pipelining
    from hvdtrain.world import World

    comm = connect(World.from_env(), "torch")
    adapter = pipeline(*(LARGE if what == "memory" else SMALL))
    adapter.arrange(comm, Pipelining(**options), lambda mesh: None)
    adapter.setup(comm)
    adapter.sync()
    if what == "memory":
        for _ in range(2):
            adapter.train_step(batch(MICROS), lr=None, weight=1.0)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found: Any = {"mb": int(status["VmHWM"].split()[0]) / 1000}
    else:
        found = timed(adapter, comm)
    everyone = comm.allgather(found, name="figures")
    if comm.world.is_primary:
        out.write_text(json.dumps(everyone))
    comm.close()


class Timed:
    """A part of a model that notes how long its passes take."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.seconds: dict[str, list[float]] = defaultdict(list)
        #: what the last pass sent
        self.sent: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in ("forward", "backward", "begin", "reduce", "apply"):
            return found

        def call(*arguments: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            message = found(*arguments, **more)
            self.seconds[name].append(time.perf_counter() - begun)
            if message is not None:
                self.sent[name] = message
            return message

        return call


def timed(adapter: Any, comm: Any) -> dict[str, Any]:
    data = batch(MICROS * MICRO_SIZE)

    def step() -> float:
        comm.allreduce([0.0], name="together")
        begun = time.perf_counter()
        adapter.train_step(data, lr=None, weight=1.0)
        return time.perf_counter() - begun

    for _ in range(3):
        step()
    part = adapter._part
    adapter._part = noted = Timed(part)
    for _ in range(6):
        step()
    adapter._part = part
    steps = [step() for _ in range(15)]
    means = {name: statistics.fmean(each[len(each) // 6 :]) for name, each in noted.seconds.items()}
    links = {}
    for number, name in enumerate(("forward", "backward")):
        sender = 0 if name == "forward" else comm.world.size - 1
        links[name] = _one_way(adapter._post, comm, noted.sent.get(name), sender, 10 + number)
    return {"steps": steps, "means": means, "links": links}


def _one_way(post: Any, comm: Any, message: Any, sender: int, tag: int) -> float:
    """Seconds of such a message between two ranks: half of the way there and back."""
    times = []
    message = comm.broadcast(message, name="message", root=sender)
    other = 1 - comm.world.rank
    for _ in range(12):
        comm.allreduce([0.0], name="together")
        begun = time.perf_counter()
        if comm.world.rank == sender:
            post.send(message, other, tag)
            post.receive(other, tag, "the answer")
        else:
            post.send(post.receive(other, tag, "the question"), other, tag)
        times.append((time.perf_counter() - begun) / 2)
    return statistics.median(times)


def run(what: str, ranks: int, options: dict[str, Any], cluster: Any = None) -> list[Any]:
    """The figures of all ranks."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        out = Path(folder) / "figures.json"
        program = [sys.executable, str(Path(__file__).resolve()), "rank", what, json.dumps(options), str(out)]
        environ = {**ENVIRONMENT, "PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent}"}
        hosts = "node1:1,node2:1" if cluster else f"localhost:{ranks}"
        start = [sys.executable, "-m", "hvdtrain", "run", "-np", str(ranks), "-H", hosts, "--launcher", "mpirun", "--"]
        words = [*(start if ranks > 1 else []), *program]
        if cluster:
            process = cluster.popen(
                "node1", "env", *(f"{name}={value}" for name, value in environ.items()), *words, cwd=BENCHMARKS
            )
            text, code = process.communicate(timeout=300)[0], process.returncode
        else:
            done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, timeout=300, check=False)
            text, code = done.stdout + done.stderr, done.returncode
        if code:
            sys.exit(f"exit code {code}:\n{text[-3000:]}")
        found: list[Any] = json.loads(out.read_text())
        return found


def predicted(found: Sequence[Any], schedule: str) -> Any:
    """What the simulator makes of the parts: seconds of a step, and its bubble."""
    from hvdtrain.pipeline.simulate import Costs, simulate

    means = [each["means"] for each in found]
    costs = Costs(
        forward=[each["forward"] for each in means],
        backward=[each["backward"] for each in means],
        activation=[found[0]["links"]["forward"]],
        gradient=[found[0]["links"]["backward"]],
    )
    outcome = simulate(schedule, len(found), MICROS, costs)  # type: ignore[arg-type]
    return outcome.total + max(each["begin"] + each["reduce"] + each["apply"] for each in means), outcome.bubble


def memory(stages: Sequence[int], runs: int) -> None:
    print(
        f"{12 * LARGE[0] ** 2 * LARGE[1] / 1e6:.0f} million parameters, Adam, {MICROS} micro-batches of 1 x {LENGTH}, 1f1b, {runs} runs"
    )
    alone = 0.0
    for count in stages:
        peaks = [[each["mb"] for each in run("memory", count, {"stages": count, "micro_batches": MICROS})] for _ in range(runs)]
        worst = [max(each) for each in peaks]
        alone = alone or statistics.median(worst)
        share = statistics.median(worst) / alone
        told = f" (at most {MEMORY_BAR:.0%}: {'kept' if share <= MEMORY_BAR else 'missed'})" if count == 4 else ""
        ranks = ", ".join(f"{statistics.median(column):,.0f}" for column in zip(*peaks, strict=True))
        print(
            f"{count} stage{'s' if count > 1 else ''}: MB of each rank {ranks}; the largest is {share:.0%} of one process{told}",
            flush=True,
        )


def times(rates: Sequence[str], schedules: Sequence[str], runs: int, file: Path | None) -> None:
    from contextlib import nullcontext

    from network import network

    print(
        f"{MICROS} micro-batches of {MICRO_SIZE} x {LENGTH}, {SMALL[1]} blocks of width {SMALL[0]}, 2 stages; {runs} runs, medians"
    )
    rows = []
    for rate in rates:
        with nullcontext() if rate == "none" else network(rate) as cluster:
            for schedule in schedules:
                ratios = []
                for _ in range(runs):
                    found = run("time", 2, {"stages": 2, "micro_batches": MICROS, "schedule": schedule}, cluster)
                    seconds, bubble = predicted(found, schedule)
                    real = statistics.median(map(max, zip(*(each["steps"] for each in found), strict=True)))
                    ratios.append((real / seconds, real, seconds, bubble, found[0]["links"]["forward"]))
                rows.append({"rate": rate, "schedule": schedule, "runs": ratios})
                middle = [statistics.median(column) for column in zip(*ratios, strict=True)]
                each = ", ".join(f"{ratio[0]:.2f}" for ratio in ratios)
                told = "kept" if abs(middle[0] - 1) <= TIME_BAR else "missed"
                where = "one host" if rate == "none" else f"{rate} between two hosts"
                print(
                    f"{where}, {schedule}: step {1e3 * middle[1]:.1f} ms, predicted {1e3 * middle[2]:.1f} ms (bubble {middle[3]:.0%}, "
                    f"a message {1e3 * middle[4]:.2f} ms): {middle[0]:.2f} of it (each run: {each}); within {TIME_BAR:.0%}: {told}",
                    flush=True,
                )
    if file is not None:
        file.write_text(json.dumps(rows))


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["memory", "time", "both"], default="both")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit"])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.what in ("memory", "both"):
        memory(chosen.stages, chosen.runs)
    if chosen.what in ("time", "both"):
        times(chosen.rates, chosen.schedules, chosen.runs, chosen.json)


if __name__ == "__main__":
    main()
