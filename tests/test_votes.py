"""How ranks agree to stop, or to meet anew."""

from __future__ import annotations

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.metrics import Mean
from hvdtrain.stops import Stops
from hvdtrain.votes import Votes
from hvdtrain.world import World

COMM = LocalCommunicator(World())


def test_a_reason_that_comes_twice_is_told_once_and_only_in_one_vote() -> None:
    votes = Votes(COMM, Stops())
    votes.add(["enough", None, ""])
    votes.add(["enough", "late"])
    votes.take(votes.bring(1), 1)
    assert votes.over == "enough; late"
    votes.over = ""
    votes.take(votes.bring(2), 2)
    assert votes.over == ""


def test_other_sums_are_left() -> None:
    votes = Votes(COMM, Stops())
    assert votes.take({**votes.bring(1), "loss": Mean(2.0, 4)}, 1) == {"loss": Mean(2.0, 4)}


def test_what_one_rank_knows_all_do_until_the_ranks_meet_again() -> None:
    votes = Votes(COMM, Stops(0), changes=lambda: True, failed=lambda: True)
    votes.take(votes.bring(1), 1)
    assert (votes.asked, votes.changed, votes.failed, votes.over) == ("--max-time 0 s is over", True, True, "")
    votes.begin(COMM, 1)
    assert (votes.asked, votes.changed, votes.failed) == ("", False, False)
