"""The checkpoints of one run as the training loop sees them: what goes into one, and what comes back from one."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.callbacks import Callback
from hvdtrain.checkpoint import resume
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import Checkpoint, Content
from hvdtrain.checkpoint.writer import Saver
from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.state import TrainState

log = logging.getLogger(__name__)

#: what a run says of its data, and of its recipe's parameters
Facts = Mapping[str, Any]
#: the best figure up to now, and the step and the figures of the last evaluation
BestSoFar = tuple[Best | None, tuple[int, Mapping[str, float]]]


class RunCheckpoints:
    """Saves and resumes one run; every rank has one.

    Args:
        root: where checkpoints go; None saves none.
        data: what the meaning of an epoch and a position hangs on.
        settings: the recipe's parameters.
        keep: how many of the newest stay.
        best: the figure whose best step stays, too.
    """

    def __init__(
        self,
        root: Path | None,
        adapter: Adapter,
        comm: Communicator,
        *,
        callbacks: Sequence[Callback] = (),
        data: Facts,
        settings: Facts,
        keep: int,
        best: Best | None = None,
    ) -> None:
        self._root, self._adapter, self._comm, self._callbacks = root, adapter, comm, callbacks
        self._data, self._settings, self._best = data, _plain(resume.masked(settings), lenient=True), best
        self._saver = None if root is None else Saver(root, adapter, comm, keep=keep)
        self._evaluated: tuple[int, Mapping[str, float]] = (-1, {})

    def move(self, comm: Communicator) -> None:
        """The ranks are those of ``comm`` from now on; what is known of the run, and what is being written, stays."""
        self._comm = comm
        if self._saver is not None:
            self._saver.move(comm)

    def resume(self, wanted: str) -> Checkpoint | None:
        """Collective. Load the checkpoint that ``--resume wanted`` asks for on every rank, callbacks included.

        Raises:
            HvdtrainError: there is none and one is asked for, or it does not belong to this recipe or its data.
        """
        found = self._load(wanted)
        if found is None:
            return None
        if dict(found.content.data) != dict(self._data):
            raise UsageError(
                f"{found.path} was saved on other data: {resume.changed(self._data, found.content.data)}",
                "resume with the same data and seed, or start anew in another directory: --run-dir NEW",
            ).everywhere()
        self._restore_callbacks(found.content.callbacks)
        is_own = self._root is not None and os.path.abspath(found.path.parent) == os.path.abspath(self._root)
        if is_own and self._best is not None and self._best.same_figure(found.content.best):
            self._best = found.content.best
        return found

    @property
    def best(self) -> BestSoFar:
        """What is known of evaluations; another rank may take it over."""
        return self._best, self._evaluated

    @best.setter
    def best(self, known: BestSoFar) -> None:
        self._best, self._evaluated = known

    def evaluated(self, step: int, values: Mapping[str, float]) -> bool:
        """Note the figures of an evaluation, the same on every rank; whether it is the best so far, which must be saved."""
        self._evaluated = (step, dict(values))
        before = self._best
        if before is not None:
            self._best = before.after(step, values)
        return self._best != before and self._saver is not None

    def save(self, state: TrainState, *, stopped: str = "") -> None:
        """Collective. Copy the state, which a thread of the primary then writes. ``stopped``: why a callback ends the run.

        Raises:
            HvdtrainError: the save before this one went wrong.
        """
        if self._saver is not None:
            self._saver.save(lambda: self._content(state, stopped))

    def wait(self) -> None:
        """Collective. Until nothing is being written. Raises HvdtrainError if it could not be."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait for this rank's write alone, however the run ends."""
        if self._saver is not None:
            self._saver.close()

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a write that went wrong: the next ``save`` or ``wait`` raises it."""
        return self._saver is not None and self._saver.failed

    def _load(self, wanted: str) -> Checkpoint | None:
        own = self._root
        if wanted == "never":
            if own is not None:
                resume.refuse_old(own, self._comm)
            return None
        if wanted == "auto":
            return None if own is None else resume.resume(own, self._adapter, self._comm, settings=self._settings)
        found = resume.resume(Path(wanted), self._adapter, self._comm, required=True, settings=self._settings)
        if own is not None and found is not None:
            resume.refuse_newer(own, found.state.step, self._comm)
        return found

    def _content(self, state: TrainState, stopped: str) -> Content:
        step, values = self._evaluated
        states = ((_name(callback), callback.state_dict()) for callback in self._callbacks)
        return Content(
            state=state,
            data=self._data,
            settings=self._settings,
            framework=self._adapter.framework,
            valid=values if step == state.step else {},
            best=self._best if self._best is not None and self._best.value is not None else None,
            # Empty ones too: of several of one class, each is found by its place.
            callbacks=tuple((name, _plain(values, name)) for name, values in states),
            stopped=stopped,
            time=time.time(),
        )

    def _restore_callbacks(self, states: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Give each callback the state of the one of its class that stood at its place among those of its class."""
        left = list(states)
        for callback in self._callbacks:
            place = next((place for place, (name, _) in enumerate(left) if name == _name(callback)), None)
            if place is not None and (state := dict(left.pop(place)[1])):
                callback.load_state_dict(state)
        lost = [name for name, state in left if state]
        if lost and self._comm.world.is_primary:
            names = ", ".join(lost)
            log.warning("the checkpoint holds the state of callbacks that the recipe does not have: %s", names)


def _name(callback: Callback) -> str:
    return type(callback).__qualname__


def _plain(values: Mapping[str, Any], owner: str = "", *, lenient: bool = False) -> dict[str, Any]:
    """``values`` as they come back from JSON; numbers of NumPy become Python's."""

    def convert(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return value.item()
        if lenient:
            return str(value)
        raise UsageError(
            f"the state_dict() of the callback {owner} holds {type(value).__name__}, which is no plain value",
            "give numbers, texts, lists and dicts of them; tensors belong into the model or the optimizer",
        )

    try:
        plain: dict[str, Any] = json.loads(json.dumps(values, default=convert))
    except (TypeError, ValueError, RecursionError) as error:  # a key that is no text, something that holds itself
        raise UsageError(
            f"the state_dict() of the callback {owner} cannot be stored: {error}" if owner else f"a setting: {error}",
            "give numbers, texts, lists and dicts of them, with texts as keys",
        ) from None
    return plain
