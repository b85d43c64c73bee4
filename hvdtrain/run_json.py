"""run.json: what a run is, with which options from where, by whom, on what."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from hvdtrain import recipe as recipes
from hvdtrain.config import Config
from hvdtrain.recipe import RecipeFunction
from hvdtrain.rundir import RunDir, write_json
from hvdtrain.trainer import Trainer


def write(run_dir: RunDir, config: Config, trainer: Trainer, function: RecipeFunction) -> None:
    """run.json: what was run, with which options from where, by whom, on what."""
    used = {name: getattr(trainer.place.recipe, name) for name in ("batch_size", "epochs", "seed")}
    of_recipe = {name: "recipe" for name in used if config.origins[name] == "default"}
    settings = recipes.defaults(function)
    write_json(
        run_dir.run_json,
        {
            "time": time.time(),
            "recipe": config.recipe,
            "settings": settings | dict(config.settings),
            "options": asdict(config.options) | used,
            "origins": {f"set.{name}": "recipe" for name in settings} | dict(config.origins) | of_recipe,
            "exchange": trainer.exchange,
            "world": asdict(trainer.comm.world),
            "host": socket.gethostname(),
            "user": _user(),
            "python": platform.python_version(),
            "versions": _versions(),
            "git": _git(),
            "argv": sys.argv,
        },
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in ("hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "mpi4py", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git() -> Mapping[str, Any] | None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
