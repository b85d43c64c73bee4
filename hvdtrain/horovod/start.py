"""Starting Horovod, alike from every framework."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.watchdog import SETUP_FACTOR

#: What Horovod and the Gloo below it say then.
_LOST = re.compile(r"Horovod has been shut down|gloo/transport/\S+\.cc")

#: of each half of Horovod, the process sets that it has, by their ranks
_KNOWN: dict[str, dict[tuple[int, ...], Any]] = {}

#: seconds after which the primary says which ranks keep which tensor waiting, and after which the job ends
STALL_CHECK_S, STALL_END_S = 10, 60


def limit_stalls(limit_s: float, environ: MutableMapping[str, str], *, ends: bool) -> None:
    """Leave the end of a job that does not move to our own watchdog, which explains it; Horovod ends it later, if nobody else did.

    Args:
        limit_s: the watchdog's; 0 if there is none. Before it is reached, the primary says once which ranks keep which tensor waiting.
        ends: whether the watchdog ends the job. If not, Horovod does not either.
    """
    if limit_s:
        environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(limit_s * 0.6))))
        environ.setdefault(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(int(limit_s * SETUP_FACTOR) + STALL_END_S) if ends else "0"
        )


def init(hvd: Any, process_sets: Sequence[Sequence[int]] = ()) -> Any:
    """Initialise ``horovod.torch`` or ``horovod.tensorflow``, with limits on how long ranks wait for each other.

    Returns:
        the process set that this rank is in: one of ``process_sets``, or that of all ranks.

    Raises:
        UsageError: Horovod runs already, and takes no more process sets.
    """
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(STALL_CHECK_S))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_END_S))
    groups = [tuple(ranks) for ranks in process_sets] if len(process_sets) > 1 else []
    known = _KNOWN.setdefault(hvd.__name__, {}) if hvd.is_initialized() else {}
    sets = [known.get(ranks) or hvd.ProcessSet(list(ranks)) for ranks in groups]
    try:
        if hvd.is_initialized():
            for ranks, made in zip(groups, sets, strict=True):
                if ranks not in known:  # Horovod refuses the same ranks twice
                    hvd.add_process_set(made)
        else:
            hvd.init(process_sets=sets or None)
    except ValueError as error:
        raise UsageError(
            f"process_sets cannot be added to a Horovod that runs already: {error}",
            "start the job with --env HOROVOD_DYNAMIC_PROCESS_SETS=1, or over MPI with one adapter that has process sets",
        ) from None
    _KNOWN[hvd.__name__] = known | dict(zip(groups, sets, strict=True))
    return next((ranks for ranks in sets if ranks.included()), hvd.global_process_set)


def lost_peers(error: BaseException | None) -> bool:
    """Whether an error says no more than that other ranks do not answer any more.

    By its words and its name: PyTorch's half of Horovod has a class for it, TensorFlow's passes the text on in a class of its own.
    """
    while error is not None:
        if type(error).__name__ == "HorovodInternalError" or _LOST.search(str(error)):
            return True
        error = error.__cause__
    return False


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
