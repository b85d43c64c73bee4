"""Options of a training run: command line over environment over config file over defaults, each knowing its origin."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from hvdtrain.errors import UsageError
from hvdtrain.recipe import convert

ENV_PREFIX = "HVDTRAIN_"
DEFAULT_FILE = Path("hvdtrain.yaml")


def _option(default: Any, help: str, *, minimum: int | None = None) -> Any:
    return field(default=default, metadata={"help": help, "minimum": minimum})


@dataclass(frozen=True)
class Options:
    """Everything about a run that is not the recipe. None: the recipe's own value, or as the help says."""

    batch_size: int | None = _option(None, "Samples of one update over all ranks (default: the recipe's).", minimum=1)
    batch_size_per_rank: int | None = _option(
        None, "Samples of one update on each rank: the global batch then grows with the ranks.", minimum=1
    )
    epochs: int | None = _option(None, "Passes over the training data (default: the recipe's).", minimum=1)
    max_steps: int | None = _option(None, "Stop after this many updates.", minimum=1)
    seed: int | None = _option(None, "Fixes the order of the samples (default: the recipe's).")
    log_every: int = _option(10, "Reduce and log metrics every so many steps.", minimum=1)
    eval_every: int | None = _option(None, "Evaluate every so many steps (default: at each end of an epoch).", minimum=1)
    save_every: int | None = _option(
        None, "Save a checkpoint every so many steps (default: at each end of an epoch).", minimum=1
    )
    keep: int = _option(3, "Checkpoints to keep.", minimum=1)
    resume: str = _option("auto", "auto: from the run directory's last good checkpoint; PATH of a checkpoint or run; never.")
    run_dir: str | None = _option(None, "Where the run's files go (default: runs/RECIPE-TIME).")


@dataclass(frozen=True)
class Config:
    """A resolved configuration."""

    recipe: str
    settings: Mapping[str, Any]
    options: Options
    #: where each option and setting came from: "command line", "environment", a file's name or "default"
    origins: Mapping[str, str]


def resolve(
    recipe: str | None,
    settings: Mapping[str, Any],
    cli: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None,
) -> Config:
    """Lay the four sources over each other. ``file`` None means ``./hvdtrain.yaml``, read only if no recipe is given.

    Raises:
        UsageError: no recipe anywhere, an unknown key, a value of another type, illegal pairs of options.
    """
    path = file if file is not None else (DEFAULT_FILE if recipe is None else None)
    content = read_file(path) if path is not None else {}
    recipe = recipe or content.pop("recipe", None)
    content.pop("recipe", None)
    if not recipe:
        raise UsageError(f"{path} names no recipe", "write a line: recipe: FILE.py")
    file_settings = content.pop("set", None) or {}
    if not isinstance(file_settings, dict):
        raise UsageError(f"{path}: 'set' must hold name: value lines, got {file_settings!r}")
    env = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() in _names() and value != ""
    }
    chosen = {name: value for name, value in cli.items() if value is not None}
    options, origins = _overlay([("command line", chosen), ("environment", env), (str(path), content)])
    for origin, values in ((str(path), file_settings), ("command line", settings)):
        origins |= {f"set.{name}": origin for name in values}
    return Config(recipe, {**file_settings, **settings}, options, origins)


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML config file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no recipe on the command line and no file {path} in {Path.cwd()}",
            "hvdtrain train FILE.py, or write hvdtrain.yaml with a line: recipe: FILE.py",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold key: value lines, got {type(content).__name__}", "for example: recipe: FILE.py")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _names() -> list[str]:
    return [option.name for option in fields(Options)]


def _overlay(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Options, dict[str, str]]:
    """Take each option from the first layer that has it; report all mistakes together."""
    hints = get_type_hints(Options)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_names(), "default")
    problems: list[str] = []
    for origin, layer in layers:
        for name in layer.keys() - hints.keys():
            close = difflib.get_close_matches(name, [*hints, "recipe", "set"], 1)
            problems.append(f"{origin}: there is no option {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    for option in fields(Options):
        for origin, layer in layers:
            if option.name not in layer:
                continue
            minimum = option.metadata["minimum"]
            try:
                value = convert(layer[option.name], hints[option.name])
                if minimum is not None and value is not None and value < minimum:
                    raise ValueError(f"must be at least {minimum}, got {value}")
            except ValueError as error:
                problems.append(f"{origin}: {option.name}: {error}")
            else:
                values[option.name], origins[option.name] = value, origin
            break
    if "batch_size" in values and "batch_size_per_rank" in values:
        problems.append(
            f"batch_size ({origins['batch_size']}) and batch_size_per_rank ({origins['batch_size_per_rank']}) exclude each other"
        )
    if problems:
        raise UsageError("; ".join(problems), "hvdtrain train --help lists the options and what they take")
    return Options(**values), origins
