"""Starting Horovod, alike from every framework."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from hvdtrain.errors import HvdtrainError

#: seconds after which the primary says which ranks keep which tensor waiting, and after which the job ends
STALL_CHECK_S, STALL_END_S = 10, 60


def init(hvd: Any) -> None:
    """Initialise ``horovod.torch`` or ``horovod.tensorflow``, with limits on how long ranks wait for each other."""
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(STALL_CHECK_S))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_END_S))
    hvd.init()


@contextlib.contextmanager
def shutdown_explained() -> Iterator[None]:
    """Turn Horovod's "has been shut down" into what it means: the other ranks do not come any more."""
    try:
        yield
    except RuntimeError as error:  # HorovodInternalError is one
        if "shut down" not in str(error):
            raise
        raise HvdtrainError(
            "this rank waited for the others to reduce with, and Horovod was shut down",
            "a rank failed, ended early (do all take the same number of steps?) or did not come for "
            f"{os.environ.get('HOROVOD_STALL_SHUTDOWN_TIME_SECONDS')} s: Horovod's lines above name missing ranks and tensors",
        ) from error
