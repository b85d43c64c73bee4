"""One rank of a side that is not hvdtrain: ``python -m common.rank FRAMEWORK SIDE TASK FOLDER``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from .laps import Laps
from .tasks import TASKS


def main(framework: str, side: str, task: str, folder: str) -> None:
    laps = Laps(Path(folder), int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    importlib.import_module(f"common.{framework}_sides").SIDES[side](TASKS[task], laps)


if __name__ == "__main__":
    main(*sys.argv[1:])
