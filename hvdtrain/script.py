"""A user's own script as one rank of a job: connected when it is first asked for, and not left hanging when it fails."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType

from hvdtrain.comm import Communicator
from hvdtrain.comm.connect import connect
from hvdtrain.errors import HvdtrainError
from hvdtrain.worker import pin_device
from hvdtrain.world import World


@cache
def communicator(framework: str) -> Communicator:
    """Collective when first called. What connects the ranks of this job; this rank then sees its own GPU alone."""
    world = World.from_env()
    pin_device(world, os.environ)
    comm = connect(world, framework)
    if world.size > 1:
        sys.excepthook = _ending(comm)
    return comm


@cache
def hosts(framework: str) -> tuple[str, ...]:
    """Collective when first called. The host of each rank."""
    return tuple(communicator(framework).allgather(socket.gethostname(), name="setup/hosts"))


def _ending(comm: Communicator) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """What an error that nobody catches does: the other ranks wait for this one, so it ends them."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alike = isinstance(error, HvdtrainError) and error.on_all_ranks
        if not alike or comm.world.is_primary:  # the primary speaks for all
            who = f"rank {comm.world.rank} on {socket.gethostname()}"
            if isinstance(error, HvdtrainError):
                sys.stderr.write(f"Error: {who}: {error}\n")
            else:
                sys.stderr.write(f"{who}:\n{''.join(traceback.format_exception(kind, error, trace))}")
        sys.stdout.flush()
        sys.stderr.flush()
        if not alike:
            comm.abort(1)

    return hook
