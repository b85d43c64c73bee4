"""Train the digits recipes on 1, 2 and 3 ranks in PyTorch and Keras, draw all loss curves in one picture, print how far apart they are.

``python benchmarks/loss_curves.py docs/loss_curves.svg``
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"PyTorch": "torch_digits", "Keras": "keras_digits"}
RANKS = (1, 2, 3)


def losses(example: str, ranks: int, base: Path) -> dict[int, float]:
    """The training loss by step."""
    run_dir = base / f"{example}-{ranks}"
    hvdtrain = [sys.executable, "-m", "hvdtrain"]
    start = ["train"] if ranks == 1 else ["run", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    options = ["--run-dir", str(run_dir), "--epochs", "6", "--log-every", "5"]
    command = [*hvdtrain, *start, str(ROOT / "examples" / f"{example}.py"), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def main(picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "hvdtrain", "font.size": 10})
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    with tempfile.TemporaryDirectory() as base:
        for framework, example in FRAMEWORKS.items():
            curves = {ranks: losses(example, ranks, Path(base)) for ranks in RANKS}
            for ranks, curve in curves.items():
                style = {1: (6.0, 0.25, "-"), 2: (2.5, 0.6, "-"), 3: (1.2, 1.0, ":")}[ranks]
                color = {"PyTorch": "#d1495b", "Keras": "#00798c"}[framework]
                label = f"{framework}, {ranks} rank{'s' if ranks > 1 else ''}"
                axes.plot(
                    *zip(*curve.items(), strict=True),
                    color=color,
                    linewidth=style[0],
                    alpha=style[1],
                    linestyle=style[2],
                    label=label,
                )
            apart = max(abs(curves[ranks][step] / curves[1][step] - 1) for ranks in RANKS[1:] for step in curves[1])
            print(f"{framework:8} 2 and 3 ranks against 1: loss within {apart:.1e} (relative) over {max(curves[1])} steps")
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title="One recipe, digits, batches of 64")
    axes.legend(ncols=2, fontsize=8)
    pyplot.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/loss_curves.svg"))
