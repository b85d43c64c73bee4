"""One decision of all ranks about which checkpoint to go on from. The primary alone looks at the file system and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.checkpoint.files import Checkpoint, find, latest, step_of, steps
from hvdtrain.comm import Communicator, agree
from hvdtrain.errors import HvdtrainError, UsageError


def resume(
    where: Path, adapter: Adapter, comm: Communicator, *, required: bool = False, settings: Mapping[str, Any] | None = None
) -> Checkpoint | None:
    """Collective. Load the newest whole checkpoint at ``where`` on every rank: a run, its ``checkpoints``, or one of them.

    Damaged checkpoints are passed over with a warning. ``settings`` are the recipe's of today.

    Returns:
        the checkpoint, or None where there is none.

    Raises:
        HvdtrainError: there is none and one is ``required``, the one named is damaged, or it does not fit the recipe.
    """

    def read() -> Checkpoint | None:
        chosen = find(where)
        if chosen is None and required:
            found = "has no whole checkpoint" if where.exists() else "does not exist"
            raise UsageError(f"cannot resume: {where} {found}", "give a run directory, or a checkpoint in it (step-...)")
        if chosen is not None:
            _load(chosen, adapter, settings or {})
        return chosen

    chosen = agree(comm, read, name="checkpoint/resume")
    if chosen is not None:
        adapter.sync()
    return chosen


def refuse_old(root: Path, comm: Communicator) -> None:
    """Collective. Raise UsageError if ``root`` holds checkpoints: a run that starts anew would mix with them and prune them."""

    def look() -> None:
        if old := steps(root):
            raise UsageError(
                f"{root} holds the checkpoints of an earlier run (up to {max(old, key=step_of).name}), and --resume is never",
                "use another --run-dir, go on with --resume auto, or remove them",
            )

    agree(comm, look, name="checkpoint/none")


def refuse_newer(root: Path, step: int, comm: Communicator) -> None:
    """Collective. Raise UsageError if ``root`` holds a whole checkpoint after ``step``: the next run would resume that one."""

    def look() -> None:
        newest = latest(root)
        if newest is not None and newest.state.step > step:
            raise UsageError(
                f"{root} holds {newest.path.name}, which is newer than the checkpoint to resume (step {step})",
                "use another --run-dir, or remove the newer checkpoints",
            )

    agree(comm, look, name="checkpoint/newer")


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, as text; those that only one side has are named as such."""
    names = [name for name in {**then, **now} if str(then.get(name)) != str(now.get(name))]
    return ", ".join(f"{name} {now.get(name, 'no more')} instead of {then.get(name, 'none')}" for name in names)


def _load(chosen: Checkpoint, adapter: Adapter, settings: Mapping[str, Any]) -> None:
    if chosen.content.framework not in ("", adapter.framework):
        raise HvdtrainError(
            f"{chosen.path} was saved by a recipe for {chosen.content.framework}, this one is for {adapter.framework}",
            "train the recipe it was saved by, or start anew: --resume never --run-dir NEW",
        )
    try:
        adapter.load(chosen.model)
    except Exception as error:
        # PyTorch says what is wrong from the second line on.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:4])
        since = changed(chosen.content.settings, settings)
        raise HvdtrainError(
            f"{chosen.path} does not fit this recipe: {type(error).__name__}: {reason}"
            + (f"; settings that changed since: {since}" if since else ""),
            "train the recipe it was saved by, or start anew: --resume never --run-dir NEW",
        ) from error
