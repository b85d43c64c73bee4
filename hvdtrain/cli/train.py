"""``hvdtrain train``: one rank of a job, or a single process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from hvdtrain.cli.train_words import pair
from hvdtrain.config import Options, resolve
from hvdtrain.recipe import RecipeFunction


def _option_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Click option for each field of Options: the names, types and help live there."""
    hints = get_type_hints(Options)
    for option in reversed(fields(Options)):
        kind = int if hints[option.name] in (int, int | None) else str
        help_text = option.metadata["help"] + ("" if option.default is None else f" (default: {option.default})")
        flag = "--" + option.name.replace("_", "-")
        takes = option.metadata["takes"] or ("|".join(get_args(hints[option.name])) if kind is str else "N")
        if hints[option.name] is bool:
            function = click.option(flag, option.name, is_flag=True, default=None, help=option.metadata["help"])(function)
        else:
            function = click.option(flag, option.name, type=kind, default=None, metavar=takes, help=help_text)(function)
    return function


@click.command()
@click.argument("recipe", required=False)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the recipe (repeatable).")
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="A YAML file of options (without RECIPE: hvdtrain.yaml)."
)
@_option_flags
def command(recipe: str | None, settings: tuple[str, ...], config: Path | None, **options: Any) -> int:
    """Train RECIPE: FILE.py, FILE.py:function or package.module:function.

    Under horovodrun, mpirun or srun this is one rank of the job; without a launcher it is a single process. Each option
    can also be set as HVDTRAIN_NAME in the environment, or in the config file.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported: warnings and errors only
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    resolved = resolve(recipe, dict(pair(text) for text in settings), options, os.environ, config)
    from hvdtrain import worker

    function: RecipeFunction | None = click.get_current_context().obj
    return worker.train(resolved, function)


def main(function: RecipeFunction) -> None:
    """Train ``function``'s recipe with the options on the command line, and exit: the last line of a recipe's file.

    ``python FILE.py --set lr=0.1`` is then the same as ``hvdtrain train FILE.py --set lr=0.1``, alone or under a launcher.
    """
    from hvdtrain.cli import main as run_command

    sys.exit(run_command(["train", f"{sys.argv[0]}:{function.__name__}", *sys.argv[1:]], obj=function))
