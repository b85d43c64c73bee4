"""Train one recipe in PyTorch, TensorFlow/Keras 3 or NumPy, on one process or on many hosts, over Horovod and MPI.

The public names are imported when they are first used (PEP 562), so that the command line starts fast and a login node
without a framework, MPI or NumPy can use the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.callbacks import Callback
    from hvdtrain.callbacks.early_stopping import EarlyStopping
    from hvdtrain.cli.train import main
    from hvdtrain.errors import HvdtrainError
    from hvdtrain.metrics import Mean
    from hvdtrain.recipe import Recipe
    from hvdtrain.update import Update
    from hvdtrain.world import World

_HOMES = {
    "Callback": "callbacks",
    "EarlyStopping": "callbacks.early_stopping",
    "HvdtrainError": "errors",
    "Mean": "metrics",
    "Recipe": "recipe",
    "Update": "update",
    "World": "world",
    "main": "cli.train",
}

__all__ = ["Callback", "EarlyStopping", "HvdtrainError", "Mean", "Recipe", "Update", "World", "main"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"hvdtrain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
