"""What a rank that stands furthest gives to the others, with a communicator that stands for them."""

from __future__ import annotations

from typing import Any

import pytest

import hvdtrain
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.handover import Handover, Held, Meeting, Standing
from hvdtrain.state import TrainState
from hvdtrain.world import World

NOTHING, AT_7, AT_8 = Standing(), Standing(7), Standing(8)
NO_BEST = None, (-1, {})


@pytest.mark.parametrize(
    ("everyone", "meeting"),
    [
        ((NOTHING, NOTHING), Meeting()),
        ((NOTHING, AT_7, AT_8, AT_8), Meeting(2)),
        ((NOTHING, Standing(torn=True)), Meeting(None, torn=True)),
        ((AT_7, Standing(7, over="enough")), Meeting(0, over="enough")),  # the reason reached one rank only
        ((Standing(7, unsaved=True), Standing(7, unsaved=True, wrote=True)), Meeting(0)),
        ((Standing(7, unsaved=True), NOTHING), Meeting(0, unsaved=True)),  # who wrote it is gone
    ],
)
def test_what_the_standings_of_all_ranks_come_to(everyone: tuple[Standing, ...], meeting: Meeting) -> None:
    assert Meeting.of(everyone) == meeting


def test_ranks_that_never_trained_begin_and_those_that_lost_what_they_held_do_not() -> None:
    assert Meeting().is_first
    assert not Meeting(None, torn=True).is_first
    assert not Meeting(0).is_first


class Others(LocalCommunicator):
    """The last rank of as many as bring ``standings`` and itself; whom it follows gives ``held``."""

    def __init__(self, *standings: Standing, held: Held | None = None) -> None:
        super().__init__(World(rank=len(standings), size=len(standings) + 1, elastic=True))
        object.__setattr__(self, "standings", standings)
        object.__setattr__(self, "held", held)

    def allgather(self, value: Any, *, name: str) -> list[Any]:
        object.__setattr__(self, "said", value)
        return [*self.standings, value]  # type: ignore[attr-defined]

    def broadcast(self, value: Any, *, name: str, root: int = 0) -> Any:
        return value if root == self.world.rank else self.held  # type: ignore[attr-defined]


class Model:
    """As much of an adapter as is needed; its copy may be interrupted."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.calls = fails, []

    def settle(self, *, saving: bool = False) -> None:
        self.calls.append("settle")

    def sync(self, root: int) -> None:
        self.calls.append(f"sync from {root}")
        if self.fails:
            raise RuntimeError("Horovod has been shut down")


class Growing(hvdtrain.Callback):
    """Gives the list that it goes on changing."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def standing(handover: Handover, step: int = 8, *others: Standing, failed: bool = False) -> Standing:
    comm = Others(*others)
    handover.meet(comm, step, "", failed=failed)
    said: Standing = comm.said  # type: ignore[attr-defined]
    return said


def test_a_rank_that_is_behind_holds_nothing_until_all_is_copied() -> None:
    behind = Handover(())
    behind.ready()
    assert standing(behind, 7) == AT_7
    there, mine = Held(TrainState(8)), Held(TrainState(7))
    with pytest.raises(RuntimeError):
        behind.follow(Others(AT_8, held=there), Model(fails=True), 0, mine)
    assert standing(behind, 7) == Standing(torn=True)
    assert behind.follow(Others(AT_8, held=there), Model(), 0, mine) == there
    behind.ready()
    assert standing(behind) == AT_8


def test_a_rank_that_has_it_all_stays_one_that_others_can_follow() -> None:
    equal = Handover(())
    equal.ready()
    with pytest.raises(RuntimeError):
        equal.follow(Others(AT_8, held=Held(TrainState(8))), Model(fails=True), 0, Held(TrainState(8)))
    assert standing(equal) == AT_8


def test_after_an_interrupted_evaluation_callbacks_stand_where_they_stood_before_it() -> None:
    watcher, model = Growing(), Model()
    handover = Handover((watcher,))
    handover.ready()
    watcher.seen.append(1)
    handover.stepped(NO_BEST)
    watcher.seen.append(2)  # an evaluation, which a loss interrupts
    held = handover.follow(Others(), model, 0, Held(TrainState(8)))
    assert (held.owes, held.callbacks, watcher.seen) == (True, ({"seen": [1]},), [1])
    watcher.seen.append(2)
    assert held.callbacks == ({"seen": [1]},)
    handover.settled()
    assert handover.follow(Others(), model, 0, Held(TrainState(8))).callbacks == ({"seen": [1, 2]},)
    assert model.calls == ["settle", "sync from 0"] * 2


def test_a_checkpoint_is_saved_again_if_the_rank_that_wrote_it_is_gone() -> None:
    other = Handover(())
    other.ready()
    other.saving(mine=False)
    assert standing(other).unsaved
    assert other.must_save
    assert standing(other).unsaved  # as long as it is not saved
    other.saving(mine=False)
    assert not other.must_save
    other.saved()
    assert standing(other) == AT_8
    assert not other.must_save


def test_who_wrote_a_checkpoint_says_so() -> None:
    for failed in (False, True):
        writer = Handover(())
        writer.ready()
        writer.saving(mine=True)
        assert standing(writer, failed=failed) == Standing(8, unsaved=True, wrote=not failed)
        assert writer.must_save == failed
    other = Handover(())
    other.ready()
    other.saving(mine=False)
    assert standing(other, 8, Standing(8, unsaved=True, wrote=True)).unsaved
    assert not other.must_save
