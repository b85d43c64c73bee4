"""Options of a training run: command line over environment over config file over what was tuned over defaults.

Each knows its origin.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, bucket_mb
from hvdtrain.pipeline.wanted import Pipelining
from hvdtrain.recipe import convert

ENV_PREFIX = "HVDTRAIN_"
#: What ``hvdtrain tune`` has found, from ``hvdtrain run`` to the ranks: ``exchange=horovod,bucket_mb=16``.
TUNED = "HVDTRAIN_TUNED"
DEFAULT_FILE = Path("hvdtrain.yaml")


def _option(default: Any, help: str, *, minimum: int | None = None, takes: str = "") -> Any:
    """``takes``: what a text or a number is called in the help."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "takes": takes})


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
    lr_scale: Literal["none", "linear", "sqrt"] = _option(
        "none", "How the recipe's lr grows with the global batch over the recipe's own: none, linear or sqrt."
    )
    share: str | None = _option(
        None, "Samples of each batch for ranks on hosts of unequal speed: node1=2,node2=1 (others: 1).", takes="HOST=N,..."
    )
    check_every: int | None = _option(
        None, "Compare all ranks' weights and optimizer every so many steps (default: when a checkpoint is saved).", minimum=1
    )
    log_every: int = _option(10, "Reduce and log metrics every so many steps.", minimum=1)
    eval_every: int | None = _option(None, "Evaluate every so many steps (default: at each end of an epoch).", minimum=1)
    save_every: int | None = _option(
        None, "Save a checkpoint every so many steps (default: at each end of an epoch).", minimum=1
    )
    keep: int = _option(3, "Newest checkpoints to keep.", minimum=1)
    keep_best: str | None = _option(
        None,
        "Save and keep the best checkpoint by a validation figure, too: valid/loss:min, valid/accuracy:max.",
        takes="FIGURE:min|max",
    )
    max_time: float | None = _option(
        None, "Save and end in order (exit code 75) after this time: 90s, 30m, 2h, 1:30:00.", takes="TIME"
    )
    exchange: Literal["auto", "horovod", "shared", "prefer-shared"] = _option(
        "auto", "How gradients travel: auto, horovod, shared (memory of one host's ranks), or prefer-shared: if it can be."
    )
    compression: str = _option(
        "none", "Of gradients, for slow networks: none, bfloat16, float16, topk[:SHARE] or powersgd[:RANK].", takes="NAME"
    )
    compression_warmup: int = _option(0, "Steps at the start without compression.", minimum=0)
    bucket_mb: float | None = _option(
        None, "Size in MB of the buckets in which gradients travel through Horovod (default: 4; PowerSGD: 16).", takes="MB"
    )
    pipeline: int = _option(
        1, "Ranks that share one model, each a stage of its layers (1: each rank has all of it).", minimum=1
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] = _option(
        "1f1b", "Order of a pipeline's micro-batches: gpipe, 1f1b, interleaved."
    )
    micro_batches: int | None = _option(
        None, "Parts in which a batch goes through a pipeline (default: 4 for each stage).", minimum=1
    )
    virtual_stages: int = _option(1, "Parts of the model on each rank of a pipeline, for --schedule interleaved.", minimum=1)
    split: str = _option(
        "parameters",
        "What the stages of a pipeline have alike: parameters, time or memory; or the layers of each: 3,5,4.",
        takes="WHAT|N,N,...",
    )
    recompute: bool = _option(False, "Compute a stage's activations again in the backward pass, instead of keeping them.")
    loader_workers: str = _option(
        "auto", "Processes that load data on each rank: a number, or auto: as it is measured.", takes="N|auto"
    )
    prefetch: str = _option(
        "auto", "Batches loaded ahead of the step: a number (0: in the step), or auto: as it is measured.", takes="N|auto"
    )
    stall_timeout: float = _option(
        60.0,
        "Explain, and end the job, when no step was done for this many seconds (10 times as many before the first; 0: never).",
        takes="S",
    )
    stall_action: Literal["end", "warn"] = _option("end", "end the job when it does not move, or only warn.")
    resume: str = _option(
        "auto",
        "auto: from the run directory's last good checkpoint; PATH of a checkpoint or run; never.",
        takes="auto|PATH|never",
    )
    run_dir: str | None = _option(None, "Where the run's files go (default: runs/RECIPE-TIME).", takes="DIR")

    @property
    def exchange_wanted(self) -> Exchange:
        size = bucket_mb(self.compression) if self.bucket_mb is None else self.bucket_mb
        return Exchange(engine=self.exchange, compression=self.compression, warmup=self.compression_warmup, bucket_mb=size)

    @property
    def pipelining(self) -> Pipelining:
        return Pipelining(
            stages=self.pipeline,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            virtual_stages=self.virtual_stages,
            split=self.split,
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class Config:
    """A resolved configuration."""

    recipe: str
    settings: Mapping[str, Any]
    options: Options
    #: where each option and setting came from: "command line", "environment", a file's name, "tuned" or "default"
    origins: Mapping[str, str]


def resolve(
    recipe: str | None,
    settings: Mapping[str, Any],
    cli: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None,
) -> Config:
    """Lay the sources over each other. ``file`` None means ``./hvdtrain.yaml``, read only if no recipe is given.

    Raises:
        UsageError: no recipe anywhere, an unknown key, a value of another type, illegal pairs of options.
    """
    path = file if file is not None else (DEFAULT_FILE if recipe is None else None)
    if path is not None and file is None and not path.exists():
        raise UsageError(
            f"there is no recipe on the command line and no file {path} in {Path.cwd()}",
            f"hvdtrain train FILE.py, or write {path} with a line: recipe: FILE.py",
        )
    content = read_file(path) if path is not None else {}
    file_recipe = content.pop("recipe", None)
    recipe = recipe or file_recipe
    if not recipe:
        raise UsageError(f"{path} names no recipe", "write a line: recipe: FILE.py")
    if not isinstance(recipe, str):
        raise UsageError(f"{path}: 'recipe' must be a text, got {recipe!r}", "write a line: recipe: FILE.py")
    file_settings = content.pop("set", None) or {}
    if not isinstance(file_settings, dict):
        raise UsageError(f"{path}: 'set' must hold name: value lines, got {file_settings!r}")
    file_settings = _with_underscores(file_settings)
    chosen = {name: value for name, value in cli.items() if value is not None}
    tuned = dict(item.split("=", 1) for item in environ.get(TUNED, "").split(",") if "=" in item)
    layers = [("command line", chosen), ("environment", _from_env(environ)), (str(path), content), ("tuned", tuned)]
    options, origins = _overlay(layers)
    for origin, values in ((str(path), file_settings), ("command line", settings)):
        origins |= {f"set.{name}": origin for name in values}
    _ = options.pipelining  # raises
    return Config(recipe, {**file_settings, **settings}, options, origins)


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML config file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the config file {path} does not exist (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold key: value lines, got {type(content).__name__}", "for example: recipe: FILE.py")
    return _with_underscores(content)


def _with_underscores(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _names() -> list[str]:
    return [option.name for option in fields(Options)]


def _from_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Options set as ``HVDTRAIN_NAME``, and what looks like one mistyped. The prefix has other uses too: those are left out."""
    found = {
        name.removeprefix(ENV_PREFIX).lower(): text for name, text in environ.items() if name.startswith(ENV_PREFIX) and text
    }
    return {name: text for name, text in found.items() if difflib.get_close_matches(name, _names(), 1, cutoff=0.8)}


def _overlay(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Options, dict[str, str]]:
    """Take each option from the first layer that has it; report all mistakes together."""
    hints = get_type_hints(Options)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_names(), "default")
    problems: list[str] = []
    for origin, layer in layers:
        for name in sorted(layer.keys() - hints.keys()):
            close = difflib.get_close_matches(name, [*hints, "recipe", "set"], 1)
            problems.append(f"{origin}: there is no option {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    for option in fields(Options):
        for origin, layer in layers:
            if option.name not in layer:
                continue
            minimum = option.metadata["minimum"]
            try:
                value = layer[option.name]
                value = convert(
                    seconds(value) if option.name == "max_time" and isinstance(value, str) else value, hints[option.name]
                )
                if minimum is not None and value is not None and value < minimum:
                    raise ValueError(f"must be at least {minimum}, got {value}")
                if isinstance(value, float) and not 0 <= value < math.inf:
                    raise ValueError(f"must be 0 or more, got {value}")
            except ValueError as error:
                problems.append(f"{origin}: {option.name}: {error}")
            else:
                values[option.name], origins[option.name] = value, origin
            break
    pair = [name for name in ("batch_size", "batch_size_per_rank") if name in values]
    if len({origins[name] for name in pair}) < len(pair):
        problems.append(f"{origins[pair[0]]}: {' and '.join(pair)} exclude each other")
    elif len(pair) == 2:  # the one from the stronger source replaces the other
        ranking = [origin for origin, _ in layers]
        weaker = max(pair, key=lambda name: ranking.index(origins[name]))
        del values[weaker]
        origins[weaker] = "default"
    if problems:
        raise UsageError("; ".join(problems), "hvdtrain train --help lists the options and what they take")
    return Options(**values), origins


def seconds(text: str) -> float:
    """A duration: ``90``, ``90s``, ``30m``, ``2h``, ``1d``, ``1h30m``, or as Slurm writes it, ``1:30:00`` or ``1-12:00:00``.

    Raises:
        ValueError: it is none, or not positive.
    """
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
    text = text.strip().lower()
    if match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text):
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        total = float(days * 86400 + hours * 3600 + minutes * 60 + secs)
    elif text and re.fullmatch(r"(\d+(\.\d+)?[dhms])*(\d+(\.\d+)?)?", text):
        total = sum(float(value) * units[unit] for value, unit in re.findall(r"(\d+(?:\.\d+)?)([dhms]?)", text))
    else:
        raise ValueError(f"expected a time like 90s, 30m, 2h or 1:30:00, got {text!r}")
    if total <= 0:
        raise ValueError(f"must be more than 0, got {text!r}")
    return total
