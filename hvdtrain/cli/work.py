"""What every rank of a job runs: a recipe, through ``hvdtrain train``, or any program."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import rundir
from hvdtrain.cli import misplaced
from hvdtrain.errors import UsageError
from hvdtrain.errors import shown as shorten
from hvdtrain.rundir import RunDir

if TYPE_CHECKING:
    from hvdtrain.config import Config

#: What ``train`` reads where no recipe is named.
CONFIG = "hvdtrain.yaml"

#: Options of ``train`` that a restart adds.
_GO_ON = ("--resume", "auto")


@dataclass(frozen=True)
class Work:
    """What every rank runs, and where it leaves its files: a recipe has a run directory, a program has none."""

    argv: tuple[str, ...]
    run_dir: Path | None = None
    recipe: str = ""  # its file, if it is one
    resume: str = "auto"
    config: Config | None = None  # what it trains, without what was tuned

    @property
    def is_recipe(self) -> bool:
        return self.run_dir is not None

    def again(self) -> Work:
        """The same, going on from what it has saved; a program has to know by itself."""
        if self.run_dir is None or self.argv[-2:] == _GO_ON:
            return self
        has_own = any(RunDir(self.run_dir).checkpoints.glob("step-*"))
        return replace(self, argv=(*self.argv, *_GO_ON)) if self.resume == "never" or has_own else self


def recipe_work(
    before: tuple[str, ...],
    what: tuple[str, ...],
    judged: Callable[[Sequence[str]], Config],
    stack: contextlib.ExitStack,
    *,
    dry_run: bool,
) -> Work:
    """A rank that trains a recipe. The recipe's file must be there; it is loaded by the ranks, not here.

    ``judged`` makes the configuration of train's words, or raises what is wrong with them.
    A run directory that is made, and left empty, is removed when ``stack`` closes.
    """
    from hvdtrain.config import read_file  # it imports NumPy, which takes longer than all else here

    options = list(what[1:])
    recipe = what[0] if what else read_file(Path(CONFIG)).get("recipe")
    if not isinstance(recipe, str):
        raise UsageError(f"{CONFIG} names no recipe", "write a line: recipe: FILE.py")
    path = recipe.partition(".py:")[0] + ".py" if ".py:" in recipe else recipe
    if path.endswith(".py") and not is_file(path):
        where = Path(path).absolute().parent
        raise UsageError(f"recipe '{path}' does not exist (looked in {where})", "check the path of the recipe")
    if not path.endswith(".py") and ":" not in recipe:
        program = " (to start a program, put -- before it)" if shutil.which(recipe) or is_file(recipe) else ""
        raise UsageError(f"'{recipe}' is no recipe{program}", "name FILE.py, FILE.py:function or package.module:function")
    misplaced.check_train(click.get_current_context(), before, recipe, options)
    resolved = judged([*what[:1], *options])
    named, resume = resolved.options.run_dir, resolved.options.resume
    run_dir = Path(named) if named else rundir.default_name(recipe) if dry_run else rundir.create(recipe)
    if not dry_run:
        if not named or not run_dir.exists():
            stack.callback(rundir.remove_empty, run_dir)
        RunDir(run_dir).check_free()
    if not named:
        options = ["--run-dir", str(run_dir), *options]
    # -P: a random.py beside the recipe must not replace Python's own in every program that starts there
    rank = (sys.executable, "-P", "-m", "hvdtrain", "train", *what[:1], *options)
    return Work(rank, run_dir, path if path.endswith(".py") else "", resume, resolved)


def is_file(path: str) -> bool:
    """Raises a UsageError where that cannot be told: a folder that is closed to us, a name that no file can have."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"'{shorten(path)}' cannot be looked at: {why}", "check the path, and who may read it") from None
