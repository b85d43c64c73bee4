"""The trainer on one process beside a loop written by hand in the same framework: the same model, batches and update.

    python benchmarks/overhead.py [--framework torch|keras] [--model tiny ...] [--runs 5] [--json FILE] [--markdown]

The loop takes its batches from a list in memory and reads the loss every ten steps; the trainer is ``hvdtrain train`` with its
defaults: it draws the batches from arrays, checks the gradients, and logs every ten steps to the console and to files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import report, runs
from common.runs import Side
from common.tasks import TASKS

#: the trainer's step time over the loop's: at most this, for the tiny model; nothing that can be measured for the others
BAR = 1.02
SIDES = {"loop": "none", "hvdtrain": "hvdtrain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", choices=("torch", "keras"), default=["torch", "keras"])
    parser.add_argument("--model", nargs="+", choices=list(TASKS), default=["tiny", "conv", "transformer"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add the runs to this file")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    rows = []
    for framework in args.framework:
        for model in args.model:
            sides = {name: Side(side, framework, ranks=1) for name, side in SIDES.items()}
            figures = runs.compare(sides, model, args.runs, f"{framework} {model}, alone", args.json)
            if len(figures) < len(SIDES):
                continue
            loop, ours = figures["loop"], figures["hvdtrain"]
            medians, fastest = report.ratios(ours, loop)
            kept = report.verdict(medians, BAR, [loop, ours])
            label = f"{TASKS[model].title}, {framework}"
            rows.append((label, *report.times(loop), *report.times(ours), f"{medians:.3f}", f"{fastest:.3f}", kept))
    columns = (
        "model",
        "loop ms",
        "fastest",
        "spread",
        "trainer ms",
        "fastest",
        "spread",
        "ratio",
        "ratio fastest",
        f"<= {BAR}",
    )
    report.Sheet(f"One process: trainer over loop; {runs.machine()}", columns, tuple(rows)).show(markdown=args.markdown)


if __name__ == "__main__":
    main()
