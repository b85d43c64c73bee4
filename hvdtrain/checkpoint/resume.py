"""One decision of all ranks about which checkpoint to go on from. The primary alone looks at the file system and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.checkpoint.files import Checkpoint, DamagedError, check, find, reading, root_of, step_of, steps
from hvdtrain.comm import Communicator, agree
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.environment import is_secret


def resume(
    where: Path, adapter: Adapter, comm: Communicator, *, required: bool = False, settings: Mapping[str, Any] | None = None
) -> Checkpoint | None:
    """Collective. Load the newest whole checkpoint at ``where`` on every rank: a run, its ``checkpoints``, or one of them.

    Damaged checkpoints are passed over with a warning, as long as a whole one is left. ``settings`` are the recipe's of today.

    Returns:
        the checkpoint, or None where there is none.

    Raises:
        HvdtrainError: there is none and one is ``required``, all or the one named are damaged, one cannot be read now, or it does
            not fit the recipe.
    """

    def read() -> Checkpoint | None:
        chosen = find(where)
        if chosen is None and steps(root_of(where)):
            raise UsageError(
                f"cannot resume: {where} has no whole checkpoint, all of them are damaged",
                f"hvdtrain checkpoint verify {where} tells why; begin anew: --resume never --run-dir NEW",
            )
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

    def is_whole(path: Path) -> bool:
        try:
            check(path, sums=False)  # reading all of it only for a warning would take as long as a resume
        except DamagedError:
            return False
        return True

    def look() -> None:
        newer = sorted((path for path in steps(root) if step_of(path) > step), key=step_of, reverse=True)
        newest = next(filter(is_whole, newer), None)
        if newest is not None:
            raise UsageError(
                f"{root} holds {newest.name}, which is newer than the checkpoint to resume (step {step})",
                "use another --run-dir, or remove the newer checkpoints",
            )

    agree(comm, look, name="checkpoint/newer")


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, as text; those that only one side has are named as such. Secrets count as equal."""
    then, now = masked(then), masked(now)
    names = [name for name in {**then, **now} if str(then.get(name)) != str(now.get(name))]
    return ", ".join(f"{name} {now.get(name, 'no more')} instead of {then.get(name, 'none')}" for name in names)


def masked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` as they may be seen and stored: without what is a secret by its name."""
    return {
        name: "***" if is_secret(name) else masked(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }


def _load(chosen: Checkpoint, adapter: Adapter, settings: Mapping[str, Any]) -> None:
    if chosen.content.framework not in ("", adapter.framework):
        raise HvdtrainError(
            f"{chosen.path} was saved by a recipe for {chosen.content.framework}, this one is for {adapter.framework}",
            "train the recipe it was saved by, or start anew: --resume never --run-dir NEW",
        )
    try:
        with reading(chosen.model):
            adapter.load(chosen.model)
    except HvdtrainError:  # it cannot be read, or says itself what is wrong
        raise
    except Exception as error:
        # PyTorch says what is wrong from the second line on.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:4])
        since = changed(chosen.content.settings, settings)
        raise HvdtrainError(
            f"{chosen.path} does not fit this recipe: {type(error).__name__}: {reason}"
            + (f"; settings that changed since: {since}" if since else ""),
            "train the recipe it was saved by, or start anew: --resume never --run-dir NEW",
        ) from error
