"""Train one recipe in PyTorch, TensorFlow/Keras 3 or NumPy, on one process or on many hosts, over Horovod and MPI.

Importing this package imports no framework, no MPI and no Click.
"""

from hvdtrain.callbacks import Callback
from hvdtrain.callbacks.early_stopping import EarlyStopping
from hvdtrain.errors import HvdtrainError
from hvdtrain.metrics import Mean
from hvdtrain.recipe import Recipe, RecipeFunction
from hvdtrain.world import World

__all__ = ["Callback", "EarlyStopping", "HvdtrainError", "Mean", "Recipe", "World", "main"]


def main(function: RecipeFunction) -> None:
    """Train ``function``'s recipe with the options on the command line: the last line of a recipe's file."""
    from hvdtrain.cli.train import main as train_main

    train_main(function)
