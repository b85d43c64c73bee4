"""hvdtrain on 1 and on 2 ranks with one thread each and as many samples on each rank: the efficiency of the second.

    python benchmarks/weak_scaling.py [--framework torch|keras] [--model conv ...] [--runs 5] [--json FILE] [--markdown]

Beside it, what the machine itself allows: the loop written by hand, alone and twice at the same time without any exchange; and
the same as it would be if the two waited for each other after each step, at no cost: the mean of the slower one's steps. Steps
that differ from each other in time cost every synchronous training that much.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import report, runs
from common.runs import Side
from common.tasks import TASKS

#: step time on 1 rank over that on 2 ranks: at least this
BAR = 0.95
SIDES = {"hvdtrain 1": ("hvdtrain", 1), "hvdtrain 2": ("hvdtrain", 2), "loop 1": ("none", 1), "loop 2": ("none", 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", choices=("torch", "keras"), default=["torch", "keras"])
    parser.add_argument("--model", nargs="+", choices=list(TASKS), default=["conv"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add the runs to this file")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    rows = []
    for framework in args.framework:
        for model in args.model:
            sides = {name: Side(side, framework, ranks=ranks) for name, (side, ranks) in SIDES.items()}
            figures = runs.compare(sides, model, args.runs, f"{framework} {model}, weak", args.json)
            if len(figures) < len(SIDES):
                continue
            one, two = figures["loop 1"], figures["loop 2"]
            pairs = {"hvdtrain": (figures["hvdtrain 1"], figures["hvdtrain 2"]), "loop, no exchange": (one, two)}
            if two.in_step is not None:
                pairs["loop, no exchange, in step"] = (one, two.in_step)
            for name, (one, two) in pairs.items():
                medians, fastest = report.ratios(one, two)
                kept = report.verdict(medians, BAR, [one, two], at_least=True) if name == "hvdtrain" else ""
                label = f"{TASKS[model].title}, {framework}, {name}"
                rows.append((label, *report.times(one), *report.times(two), f"{medians:.3f}", f"{fastest:.3f}", kept))
    columns = ("model", "1: ms", "fastest", "spread", "2: ms", "fastest", "spread", "1 / 2", "1 / 2 fastest", f">= {BAR}")
    report.Sheet(f"Weak scaling, 1 to 2 ranks; {runs.machine()}", columns, tuple(rows)).show(markdown=args.markdown)


if __name__ == "__main__":
    main()
