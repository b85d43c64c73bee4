"""Step time of the same model and data under hvdtrain and its peers, on 2 ranks of this machine with one thread each.

    python benchmarks/peers.py [--framework torch|keras] [--model tiny conv ...] [--sides none ddp ...] [--runs 3]
                               [--exchange shared horovod ...] [--fused] [--json FILE] [--markdown]

Sides: none (each rank by itself, for reference), ddp (PyTorch: DistributedDataParallel over Gloo), mwms (Keras: fit under
MultiWorkerMirroredStrategy, patched to run), horovod (a plain script with Horovod's defaults), hvdtrain (hvdtrain run ...).
Each run starts its ranks anew; the sides take turns. With --json the runs are added to those that FILE has, and the table is
of all of them: so a long measurement can be made in pieces. --runs 0 prints what is there. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from common import report, runs
from common.runs import Figures, Side
from common.tasks import TASKS

SIDES = {"torch": ("none", "ddp", "horovod", "hvdtrain"), "keras": ("none", "mwms", "horovod", "hvdtrain")}
#: hvdtrain's step time over a peer's: at most this
BARS = {
    "ddp": {"tiny": 0.5, "conv": 1.0, "transformer": 0.85, "embedding": 0.6},
    "horovod": {"tiny": 0.8, "conv": 1.0, "transformer": 0.9, "embedding": 0.7},
    "mwms": {"tiny": 0.6, "conv": 0.9, "transformer": 0.8, "embedding": 0.7},
}
#: hvdtrain's memory over DDP's: at most this
MEMORY_BAR = 1.05


def sides(framework: str, names: list[str], exchanges: list[str], *, fused: bool) -> dict[str, Side]:
    """By what they are called in the tables."""
    found = {name: Side(name, framework, fused=fused) for name in SIDES[framework] if name in names}
    if exchanges and (ours := found.pop("hvdtrain", None)):
        found |= {f"hvdtrain {exchange}": replace(ours, options=("--exchange", exchange)) for exchange in exchanges}
    return found


def sheet(title: str, model: str, figures: dict[str, Figures]) -> report.Sheet:
    rows = []
    for name, side in figures.items():
        over = f"{side.median / figures['none'].median:.2f}" if "none" in figures else ""
        for ours in [ours for ours in figures if ours.startswith("hvdtrain")] or [""]:
            cells: tuple[str, ...] = ("", "", "")
            if ours and ours != name and not name.startswith("hvdtrain"):
                medians, fastest = report.ratios(figures[ours], side)
                bar = BARS.get(name, {}).get(model)
                kept = "" if bar is None else f"<= {bar}: {report.verdict(medians, bar, [figures[ours], side])}"
                cells = f"{medians:.2f}", f"{fastest:.2f}", kept
            label = f"{name} ({ours})" if ours not in ("", "hvdtrain") and any(cells) else name
            rows.append((label, *report.times(side), over, *cells, f"{side.peak_mb:.0f}"))
            if name.startswith("hvdtrain"):
                break
    columns = ("side", "step ms", "fastest ms", "spread", "/ none", "ratio", "ratio fastest", "bar", "MB a rank")
    return report.Sheet(title, columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--model", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=sorted({name for names in SIDES.values() for name in names}))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--exchange", nargs="+", default=[], help="hvdtrain's side once for each, instead of its default")
    parser.add_argument("--fused", action="store_true", help="PyTorch's Adam with fused=True on every side, not its default")
    parser.add_argument("--json", type=Path, help="add the runs to this file")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    args.sides = args.sides or [name for names in SIDES.values() for name in names]
    for framework in args.framework:
        fused = args.fused and framework == "torch"
        compared = sides(framework, args.sides, args.exchange, fused=fused)
        for model in args.model:
            cell = f"{framework} {model}{', fused' if fused else ''}"
            figures = runs.compare(compared, model, args.runs, cell, args.json)
            if not figures:
                continue
            task = TASKS[model]
            kind = f"{framework}{', fused Adam' if fused else ''}"
            title = f"{task.title}, {kind}, 2 ranks, {task.batch} samples on each; {runs.machine()}"
            sheet(title, model, figures).show(markdown=args.markdown)
            for ours in (name for name in figures if name.startswith("hvdtrain")):
                if "ddp" in figures:
                    share = figures[ours].peak_mb / figures["ddp"].peak_mb
                    print(f"Memory of {ours} over DDP's: {share:.2f}, asked for: at most {MEMORY_BAR}\n")


if __name__ == "__main__":
    main()
