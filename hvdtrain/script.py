"""A user's own script as one rank of a job: connected when it is first asked for, and not left hanging when it fails."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from functools import cache
from types import TracebackType

from hvdtrain.comm import Communicator
from hvdtrain.comm.connect import connect
from hvdtrain.devices import pin_device
from hvdtrain.progress import HERE
from hvdtrain.rank import Rank, fail
from hvdtrain.world import World

log = logging.getLogger(__name__)


@cache
def communicator(framework: str) -> Communicator:
    """Collective when first called. What connects the ranks of this job; this rank then sees its own GPU alone."""
    world = World.from_env()
    pin_device(world, os.environ)
    comm = connect(world, framework)
    if world.size > 1:
        rank = Rank(world, comm)
        HERE.enter("the script")

        def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            _done.update(_expected)
            fail(rank, error)  # one that all ranks raise alike ends each in order, any other one ends all at once

        sys.excepthook = last_words
    return comm


@cache
def hosts(framework: str) -> tuple[str, ...]:
    """Collective when first called. The host of each rank."""
    return tuple(communicator(framework).allgather(socket.gethostname(), name="setup/hosts"))


def expect(what: str, why: str) -> None:
    """Warn at the end of the script if ``done(what)`` was not called until then."""
    if what not in _done and what not in _expected:
        _expected.add(what)
        atexit.register(lambda: None if what in _done else log.warning("%s was never called: %s", what, why))


def done(what: str) -> None:
    """Note that the script called ``what``."""
    _done.add(what)


_expected: set[str] = set()
_done: set[str] = set()
