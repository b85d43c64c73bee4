"""How an elastic job goes on: what a rank that stands furthest gives to those that join or fell behind."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.callbacks import Callback
from hvdtrain.checkpoint.run import BestSoFar
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.state import TrainState


@dataclass(frozen=True)
class Held:
    """What a rank holds beside the adapter's state."""

    state: TrainState = field(default_factory=TrainState)
    #: step at which the job began
    first_step: int = 0
    #: names of the figures of the steps since the last log line
    window: tuple[str, ...] = ()
    #: of the last evaluation
    values: Mapping[str, float] = field(default_factory=dict)
    best: BestSoFar = (None, (-1, {}))
    #: whether what is due after the last step (a log line, an evaluation, a checkpoint) is still to be done
    owes: bool = False
    callbacks: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Standing:
    """What a rank tells of itself when the ranks meet."""

    #: it has done; -1: it holds nothing that others could take over
    step: int = -1
    #: it has lost what it held while it was to take over more
    torn: bool = False
    #: why the training is over, as far as it knows
    over: str = ""
    #: a checkpoint was begun of which it does not know that it is written
    unsaved: bool = False
    #: it has written that checkpoint itself, to the end
    wrote: bool = False


@dataclass(frozen=True)
class Meeting:
    """What the standings of all ranks come to, the same on every rank."""

    #: the rank to follow; None if none holds anything
    root: int | None = None
    torn: bool = False
    over: str = ""
    #: the last checkpoint may be lost, with the rank that was writing it
    unsaved: bool = False

    @property
    def is_first(self) -> bool:
        """Whether no rank has trained yet."""
        return self.root is None and not self.torn

    @classmethod
    def of(cls, everyone: Sequence[Standing]) -> Meeting:
        steps = [each.step for each in everyone]
        return cls(
            None if max(steps) < 0 else steps.index(max(steps)),
            any(each.torn for each in everyone),
            next((each.over for each in everyone if each.over), ""),
            any(each.unsaved for each in everyone) and not any(each.wrote for each in everyone),
        )


class Handover:
    """One rank's side of it, over all rounds."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._ready = self._torn = False
        #: see ``Held``
        self.owes = False
        self._before: tuple[tuple[dict[str, Any], ...], BestSoFar] = (), (None, (-1, {}))
        #: the last checkpoint is to be saved again
        self.must_save = False
        self._unsaved = self._mine = False

    def stepped(self, best: BestSoFar) -> None:
        """A step is done, and what is due after it is not. If that is interrupted, it begins from here again."""
        self.owes, self._before = True, (self._states(), best)

    def settled(self) -> None:
        """What was due after the last step is done."""
        self.owes = False

    def saving(self, *, mine: bool) -> None:
        """A checkpoint has begun to be written; ``mine``: by this rank."""
        self.must_save, self._unsaved, self._mine = False, True, mine

    def saved(self) -> None:
        """All ranks know that nothing is being written any more."""
        self._unsaved = False

    def meet(self, comm: Communicator, step: int, over: str, *, failed: bool) -> Meeting:
        """Collective. Where the ranks stand. ``failed``: what this rank wrote last went wrong."""
        unsaved = self._unsaved or self.must_save
        wrote = self._unsaved and self._mine and not failed
        mine = Standing(step if self._ready else -1, self._torn, over, unsaved, wrote)
        meeting = Meeting.of(comm.allgather(mine, name="setup/standing"))
        self.must_save, self._unsaved = meeting.unsaved, False
        return meeting

    def follow(self, comm: Communicator, adapter: Adapter, root: int, mine: Held) -> Held:
        """Collective. Stand where ``root`` stands, and return what it holds.

        A lost rank may have let some do a step that others could not finish. Whoever is behind holds nothing that can be used
        while the state of the model is being copied; so if that is interrupted, nobody follows it.
        """
        held: Held = comm.broadcast(self._whole(mine) if comm.world.rank == root else None, name="setup/held", root=root)
        if held.state != mine.state:
            self._ready, self._torn = False, True
        adapter.settle()  # what the others have gathered since the last time is not lost
        adapter.sync(root)
        for callback, state in zip(self._callbacks, held.callbacks, strict=True):
            if state:
                callback.load_state_dict(copy.deepcopy(state))
        self.owes, self._before = held.owes, (held.callbacks, held.best)
        return held

    def ready(self) -> None:
        """This rank holds all that others need."""
        self._ready, self._torn = True, False

    def _whole(self, mine: Held) -> Held:
        states, best = self._before if self.owes else (self._states(), mine.best)
        return Held(mine.state, mine.first_step, mine.window, mine.values, best, self.owes, states)

    def _states(self) -> tuple[dict[str, Any], ...]:
        """Copies: callbacks may give what they go on changing."""
        return tuple(copy.deepcopy(callback.state_dict()) for callback in self._callbacks)


def refuse_torn() -> HvdtrainError:
    """What all ranks raise if none of them holds a whole state any more, and no checkpoint does."""
    return HvdtrainError(
        "the ranks that held the state of the training are lost, while the others were taking it over",
        "start the job again; with --run-dir and --save-every it goes on from its last checkpoint",
    ).everywhere()
