"""Time from ``hvdtrain run`` to the end of the first step, by phase, beside what the imports alone cost.

    python benchmarks/startup.py [--ranks 2] [--runs 3] [--framework torch keras]

The bare side is as many Pythons at once that import what the recipe's file imports and build the recipe: no launcher, no MPI, no
Horovod, nothing trained. The sides take turns; the first round, which reads the disk, is left out.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"torch": ROOT / "examples" / "torch_digits.py", "keras": ROOT / "examples" / "keras_digits.py"}

#: The bare side: what nobody who trains this recipe can do without.
BARE = "import runpy, sys; runpy.run_path(sys.argv[1])['recipe']()"


def environment() -> dict[str, str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles our modules anew, which no installation does
    return {**env, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


def ours(recipe: Path, ranks: int) -> dict[str, float]:
    """Seconds by phase; "in all" also has the command's own Python."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = ["--epochs", "1", "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "hvdtrain", "run", "-np", str(ranks), str(recipe), *options]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
            assert process.stdout is not None
            at = next((time.perf_counter() for line in process.stdout if "first step after" in line), None)
            process.communicate()
        if process.returncode or at is None:
            sys.exit(f"hvdtrain run failed with exit code {process.returncode}: {' '.join(command)}")
        phases: dict[str, float] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["startup"]
    return {**phases, "in all": at - started}


def bare(recipe: Path, ranks: int) -> float:
    """Seconds until all of them are done."""
    command = [sys.executable, "-c", BARE, str(recipe)]
    quiet = subprocess.DEVNULL
    started = time.perf_counter()
    processes = [subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment()) for _ in range(ranks)]
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"the imports alone failed: {' '.join(command)}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--framework", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    args = parser.parse_args()
    for framework in args.framework:
        recipe = RECIPES[framework]
        phases: list[dict[str, float]] = []
        alone: list[float] = []
        for _ in range(args.runs + 1):
            alone.append(bare(recipe, args.ranks))
            phases.append(ours(recipe, args.ranks))
        del alone[0], phases[0]
        print(
            f"\n{framework}, {args.ranks} ranks, {args.runs} runs: seconds", f"{'':18} {'median':>8} {'fastest':>8}", sep="\n"
        )
        for name in phases[-1]:
            values = [each.get(name, 0.0) for each in phases]
            print(f"{name:18} {statistics.median(values):8.2f} {min(values):8.2f}")
        print(f"{'imports alone':18} {statistics.median(alone):8.2f} {min(alone):8.2f}")
        more = [each["in all"] - seconds for each, seconds in zip(phases, alone, strict=True)]
        print(f"{'in all - imports':18} {statistics.median(more):+8.2f} {min(more):+8.2f}", flush=True)


if __name__ == "__main__":
    main()
