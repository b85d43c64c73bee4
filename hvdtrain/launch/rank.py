"""Starts the relay: ``python -S -E .../rank.py --slots ... -- PROGRAM``.

Started by its file name, it makes an empty ``hvdtrain`` package instead of importing the real one: a relay starts for every rank,
and importing the package would import NumPy.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    package = types.ModuleType("hvdtrain")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["hvdtrain"] = package
    sys.path.pop(0)  # this folder: its modules are hvdtrain.launch.*, and nothing else

    from hvdtrain.launch.relay import main

    sys.exit(main(sys.argv[1:]))
