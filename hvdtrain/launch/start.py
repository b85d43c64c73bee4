"""Starts one of our small programs: ``python -S -E .../start.py relay|local|this_host ARGS``.

Started by its file name and without site-packages, it makes an empty ``hvdtrain`` package instead of importing the real one: it
starts for every rank and on every host, and importing the package would import NumPy (0.2 s).
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

PROGRAMS = ("relay", "local", "this_host")

if __name__ == "__main__":
    package = types.ModuleType("hvdtrain")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["hvdtrain"] = package
    sys.path.pop(0)  # this folder: its modules are hvdtrain.launch.*, and nothing else
    if sys.argv[1:2] == [] or sys.argv[1] not in PROGRAMS:
        sys.exit(f"start.py: name one of {', '.join(PROGRAMS)}")
    sys.exit(importlib.import_module(f"hvdtrain.launch.{sys.argv[1]}").main(sys.argv[2:]))
