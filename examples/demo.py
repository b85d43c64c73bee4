"""Train the digits recipe on two ranks over Horovod, in PyTorch and in Keras, and show what came out."""

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

HERE = Path(__file__).parent.relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__).parent
RECIPES = {"PyTorch": HERE / "torch_digits.py", "Keras": HERE / "keras_digits.py"}
GOAL = 0.95


def main() -> int:
    started = time.strftime("%Y%m%d-%H%M%S")
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 100)  # the table whole, also through a pipe
    table = Table("framework", "ranks", "steps", "samples/s", "valid. accuracy", Column("run directory", no_wrap=True))
    good = True
    for name, recipe in RECIPES.items():
        run_dir = Path("runs") / f"demo-{started}" / recipe.stem
        command = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "-H", "localhost:2", "--launcher", "horovodrun"]
        console.print(f"\n{name}: hvdtrain {' '.join(command[3:])} {recipe} --run-dir {run_dir}", soft_wrap=True)
        code = subprocess.run([*command, recipe, "--run-dir", run_dir], check=False).returncode
        if code:
            return code
        summary = json.loads((run_dir / "summary.json").read_text())
        accuracy = summary["valid"]["valid/accuracy"]
        good &= accuracy >= GOAL
        speed = f"{summary['samples_per_s']:,.0f}"
        table.add_row(name, str(summary["ranks"]), str(summary["steps"]), speed, f"{accuracy:.1%}", str(run_dir))
    console.print()
    console.print(table)
    if not good:
        console.print(f"A validation accuracy is below {GOAL:.0%}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
