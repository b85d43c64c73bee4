"""A rank's life in rounds: connect, train, and in an elastic job again with those who are there, when ranks are lost or join.

All ranks, those who go on and those who join, do the same in a round. The collectives of the set-up tell the joining ranks where
the others stand (``Trainer.prepare``), so nobody has to know beforehand who is new.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.comm import Communicator
from hvdtrain.comm.connect import connect
from hvdtrain.comm.driver import HostChanges, LeftOutError
from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import start
from hvdtrain.loggers.console import say
from hvdtrain.progress import HERE
from hvdtrain.rank import Rank
from hvdtrain.stops import StopNow
from hvdtrain.trainer import HostsChangedError

#: As often, at the same step and with the same ranks, an error counts as one that other ranks were lost.
_TRIES = 3

Members = dict[str, str]


@dataclass(frozen=True)
class Change:
    """Who is there in this round and was not in the last one, and the other way round, as sentences."""

    gone: tuple[str, ...]
    joined: tuple[str, ...]
    #: why the last round ended
    cause: str
    began_at: float

    def text(self, ranks: int, step: int) -> str:
        """One line, once training goes on."""
        who = [_listed(self.gone, "is gone", "are gone"), _listed(self.joined, "joined", "joined")]
        why = "; ".join(filter(None, who)) or f"{self.cause}; all ranks are there again"
        go_on = f"{ranks} ranks go" if ranks > 1 else "1 rank goes"
        return f"{why}; {go_on} on at step {step} (after {time.monotonic() - self.began_at:.1f} s)"


def rounds(rank: Rank, framework: str, hosts: HostChanges, body: Callable[[Change | None], None]) -> None:
    """Connect and call ``body`` with what has changed since this rank's last round (None in its first), until it returns.

    Args:
        hosts: is told when hosts come or go.

    Raises:
        Exception: what ends this rank itself; the others of an elastic job go on without it.
    """
    members: Members = {}
    cause, began_at, last, tries = "", 0.0, "", 0
    again = False
    if rank.world.elastic:
        hosts.listen()
    while True:
        try:
            rank.comm = _connect(rank, framework, again=again)
            rank.world = rank.comm.world
            if not rank.world.elastic:
                body(None)
                return
            before, members = members, _members(rank.comm)
            change = Change(_labels(before, members), _labels(members, before), cause, began_at) if before else None
            body(change)
            return
        except LeftOutError:
            say(f"rank {rank.world.rank} on {socket.gethostname()} leaves: its host is no longer one of the job's")
            return
        except HostsChangedError:
            cause, last, tries = "hosts came or went", "", 0
        except Exception as error:
            if not (rank.world.elastic and start.lost_peers(error)):
                raise
            cause = "a rank did not answer"
            place = f"{HERE.step} {sorted(members)}"
            tries = tries + 1 if place == last else 1
            last = place
            if tries >= _TRIES:  # nobody is lost: it is this step
                raise
        again, began_at = True, time.monotonic()
        hosts.noticed = False  # the next round has all hosts that the driver knows of when the ranks meet
        _leave(rank)


def _connect(rank: Rank, framework: str, *, again: bool) -> Communicator:
    try:
        return connect(rank.world, framework, again=again)
    except StopNow as error:
        if not again:
            raise
        raise StopNow("told to end while it waited for the other ranks of the elastic job") from error


def _leave(rank: Rank) -> None:
    """Let go of what the round had. Nothing here waits for another rank that lives."""
    HERE.step, HERE.training = None, False
    HERE.enter("meeting the other ranks again")
    if rank.comm is not None:
        with contextlib.suppress(HvdtrainError, RuntimeError, ValueError):
            rank.comm.close()
        rank.comm = None
    if rank.lock is not None:
        rank.lock.close()
        rank.lock = None


def _members(comm: Communicator) -> Members:
    """Collective. The processes of this round: what tells them apart, and how people call them."""
    mine = f"{socket.gethostname()}/{os.environ.get('HOROVOD_HOSTNAME')}/{os.getpid()}", socket.gethostname()
    everyone = comm.allgather(mine, name="setup/members")
    return {process: f"rank {rank} on {host}" for rank, (process, host) in enumerate(everyone)}


def _labels(these: Members, those: Members) -> tuple[str, ...]:
    return tuple(label for process, label in these.items() if process not in those)


def _listed(labels: tuple[str, ...], one: str, several: str) -> str:
    return f"{', '.join(labels)} {one if len(labels) == 1 else several}" if labels else ""
