"""Start real ranks and read what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "tests" / "support" / "recipes.py"
LAUNCHERS = {"mpirun": ["--launcher", "mpirun"], "horovodrun-gloo": ["--launcher", "horovodrun", "--gloo"]}


def hvdtrain(*arguments: str | Path, cwd: Path, timeout: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would and return its output; never raises for its exit code."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | more
    command = [sys.executable, "-m", "hvdtrain", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def train(framework: str, ranks: int, launcher: str, out: Path, *options: str | Path) -> Path:
    """Train ``framework``'s small recipe on ``ranks`` ranks (1: without a launcher); ``out`` holds what they wrote."""
    start = ["train"] if ranks == 1 else ["run", "-np", ranks, "-H", f"localhost:{ranks}", *LAUNCHERS[launcher]]
    out.mkdir(parents=True, exist_ok=True)
    result = hvdtrain(*start, f"{RECIPES}:{framework}", "--set", f"out={out}", *options, cwd=out)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def run_module(module: str, ranks: int, out: Path, *arguments: str, timeout: float = 600) -> Path:
    """Run ``python -m module OUT ARGUMENTS`` as a user would launch it; ``out`` holds what the ranks wrote."""
    command = [
        "run",
        "-np",
        ranks,
        "-H",
        f"localhost:{ranks}",
        "--launcher",
        "mpirun",
        "--",
        sys.executable,
        "-m",
        module,
        out,
        *arguments,
    ]
    if ranks > 1:
        result = hvdtrain(*command, cwd=ROOT, timeout=timeout)
    else:
        result = subprocess.run(
            list(map(str, command[command.index("--") + 1 :])), cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def weights(out: Path, rank: int = 0) -> list[np.ndarray]:
    with np.load(out / f"rank-{rank}.npz") as saved:
        return [saved[name] for name in saved.files]


def batches(out: Path, ranks: int) -> list[list[int]]:
    """The global batches that ``ranks`` ranks loaded, in order: the parts of all ranks joined.

    Where a thread loads ahead, on the ranks that have chosen so, the last ones were loaded in vain.
    """
    taken = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return [[index for part in parts for index in part] for parts in zip(*taken, strict=False)]


def difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest difference of two sets of tensors, relative to the largest value of each tensor."""
    tiny = np.finfo(np.float32).tiny  # a bias that nothing has moved yet is all zeros
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), tiny)) for a, b in zip(first, second, strict=True))
