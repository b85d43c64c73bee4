"""``hvdtrain checkpoint``: what a run has saved, whether it is whole, and its weights for other programs."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.files import Checkpoint, DamagedError
from hvdtrain.errors import HvdtrainError, UsageError

_TORCH = "model.safetensors"
_TORCH_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True)
class Entry:
    """One line of ``list``."""

    path: str
    step: int
    bytes: int
    #: the one that it is in, or has just ended
    epoch: int | None = None
    samples: int | None = None
    #: seconds since 1970
    time: float | None = None
    framework: str = ""
    valid: dict[str, float | None] | None = None
    best: bool = False
    stopped: str = ""
    #: what is wrong with it
    fault: str = ""


@click.group()
def command() -> None:
    """Show, check and export what training runs have saved."""


@command.command("list")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(run: Path, as_json: bool) -> None:
    """List the checkpoints of RUN, a run directory or its checkpoints.

    Names, sizes and times only; `hvdtrain checkpoint verify` reads every byte.
    """
    entries = [entry for path in _paths(run) if (entry := _entry(path)) is not None]
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=1))
        return
    for entry in entries:
        if entry.fault:
            click.echo(f"{Path(entry.path).name}  damaged: {entry.fault}")
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        figures = "".join(f"  {name} {value:.4g}" for name, value in (entry.valid or {}).items() if value is not None)
        marks = ("  best" if entry.best else "") + (f"  stopped early: {entry.stopped}" if entry.stopped else "")
        click.echo(f"{Path(entry.path).name}  epoch {entry.epoch}  {_size(entry.bytes)}  {saved}{figures}{marks}")


@command.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
def verify(paths: tuple[Path, ...]) -> int:
    """Read every byte of the checkpoints at PATHS: checkpoints, or runs with all of theirs. Exit code 1 if one is damaged."""
    damaged = 0
    for path in [found for given in paths for found in _paths(given)]:
        faults = _faults(path)
        damaged += bool(faults)
        click.echo(f"{path}: {'; '.join(faults) if faults else 'whole'}")
    return 1 if damaged else 0


@command.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(path: Path, out: Path) -> None:
    """Write the weights of the checkpoint at PATH to OUT, for programs without hvdtrain.

    PATH is a checkpoint, or a run: then its newest one. OUT ends in .safetensors or .pt (PyTorch: a state_dict),
    .weights.h5 (Keras: model.load_weights) or .npz (NumPy).
    """
    found = _one(path)
    weights = next(iter(sorted(found.model.glob("model.*"))), None)
    if weights is None:
        raise UsageError(f"{found.path} has no weights to export: no file model/model.*")
    if out.exists():
        raise UsageError(f"{out} exists already", "give a new name, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"the directory {out.parent} does not exist", f"mkdir -p {out.parent}")
    suffix = weights.name.removeprefix("model")
    also = _TORCH_SUFFIXES if weights.name == _TORCH else ()
    if not out.name.endswith((suffix, *also)):
        raise UsageError(
            f"{found.path} holds {found.content.framework} weights, and {out.name} does not end in "
            + " or ".join((suffix, *also)),
            f"hvdtrain checkpoint export {path} {out.with_suffix('')}{suffix}",
        )
    part = out.with_name(f".{out.name}.part")
    try:
        if weights.name == _TORCH:
            _export_torch(found, out, part)
        else:
            shutil.copyfile(weights, part)
        os.replace(part, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    click.echo(f"{out}: the weights of {found.path} ({_size(out.stat().st_size)})")


def _export_torch(found: Checkpoint, out: Path, part: Path) -> None:
    if out.suffix in _TORCH_SUFFIXES:
        from hvdtrain.adapters import torch_files

        torch_files.export(found.model, part)
    elif (found.model / "state.pt").exists():
        raise UsageError(
            f"{found.path} holds weights that safetensors has no form for",
            f"hvdtrain checkpoint export {found.path} {out.with_suffix('.pt')}",
        )
    else:
        shutil.copyfile(found.model / _TORCH, part)


def _paths(where: Path) -> list[Path]:
    """The checkpoint at ``where``, or all under it.

    Raises:
        UsageError: there is none.
    """
    if files.is_checkpoint(where) and where.is_dir():
        return [files.resolve(where)]
    found = sorted(files.steps(files.root_of(where)), key=files.step_of)
    if not found:
        state = "holds no checkpoint" if where.exists() else "does not exist"
        raise UsageError(f"{where} {state}", "give a run directory, or a checkpoint in it (step-...)")
    return found


def _one(where: Path) -> Checkpoint:
    _paths(where)  # raises if there is none
    found = files.find(where)
    if found is None:
        raise UsageError(f"{where} has no whole checkpoint", f"hvdtrain checkpoint verify {where}")
    return found


def _entry(path: Path) -> Entry | None:
    """None where the run that writes has just removed it."""
    step, size = files.step_of(path), files.size_of(path)
    try:
        found = files.check(path, sums=False)
    except (DamagedError, HvdtrainError) as error:
        return Entry(str(path), step, size, fault=str(error).splitlines()[0]) if path.exists() else None
    content, best = found.content, path.parent / files.BEST
    return Entry(
        str(path),
        step,
        size,
        epoch=content.state.epoch + (1 if content.state.position else 0),
        samples=content.state.samples,
        time=content.time,
        framework=content.framework,
        valid=dict(content.to_json()["valid"]),
        best=best.is_symlink() and files.resolve(best) == path,
        stopped=content.stopped,
    )


def _faults(path: Path) -> list[str]:
    try:
        faults = list(files.faults(path))
        if not faults:
            files.check(path, sums=False)  # what state.json says
    except (DamagedError, HvdtrainError) as error:
        return [str(error).splitlines()[0]]
    return faults


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
