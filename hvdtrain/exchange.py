"""How gradients travel between ranks: what can be asked for, and what is used and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UsageError
from hvdtrain.update import Update
from hvdtrain.world import World

Engine = Literal["auto", "horovod", "shared", "prefer-shared"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the user asks for.

    Attributes:
        engine: "horovod": flat buckets, each reduced by Horovod as soon as it is ready. "shared": through memory that the
            ranks of a host share. "prefer-shared": the second where it can be had, else the first. "auto": the second where
            it can be had and is faster, else the first.
        compression: as ``hvdtrain.compression.parse`` takes it.
        warmup: steps at the start without compression.
        bucket_mb: size of a bucket in MB (2**20 bytes).
    """

    engine: Engine = "auto"
    compression: str = "none"
    warmup: int = 0
    bucket_mb: float = 4.0


def bucket_mb(compression: str) -> float:
    """The size of buckets where the user has not said: PowerSGD waits for the others three times in each."""
    return 16.0 if compression.startswith("powersgd") else Exchange.bucket_mb


@dataclass(frozen=True)
class Choice:
    engine: Literal["horovod", "shared"]
    reason: str


def choose(wanted: Exchange, refusals: Sequence[str], world: World) -> Choice:
    """The engine, the same on all ranks.

    Args:
        refusals: of each rank, why it cannot take part in "shared"; empty if it can.

    Raises:
        UsageError: "shared" is asked for and a rank cannot.
    """
    rank, why = next(((rank, why) for rank, why in enumerate(refusals) if why), (0, ""))
    if why and not all(refusals):
        why = f"rank {rank}: {why}"
    if wanted.engine == "shared" and why:
        raise UsageError(
            f"--exchange shared is not possible: {why}", "use --exchange horovod or auto, or leave out what stands in the way"
        ).everywhere()
    if wanted.engine in ("shared", "prefer-shared"):
        return Choice("horovod", f"shared memory is preferred, but {why}") if why else Choice("shared", "asked for")
    if wanted.engine == "horovod":
        return Choice("horovod", "asked for")
    if not why and world.num_nodes > 1:
        why = "several hosts"
    if why:
        return Choice("horovod", why)
    return Choice("shared", f"the {world.size} ranks share this host's memory")


def refusal(
    world: World, update: Update, wanted: Exchange, *, over_mpi: bool, on_host: bool, needed: int, room: int | None
) -> str:
    """Why a rank cannot exchange gradients through shared memory; empty if it can.

    Args:
        over_mpi: whether the ranks meet over MPI.
        on_host: whether the model is in host memory.
        needed: bytes that the ranks of this host need together, ``room`` those that there are (None: unknown).
    """
    if not on_host:
        return "the model is on a GPU"
    if world.elastic:
        return "ranks of an elastic job may come and go"
    if not over_mpi:
        return "the ranks meet over Gloo, shared memory needs MPI"
    if wanted.compression != "none":
        return f"--compression {wanted.compression} goes with horovod"
    if world.local_size == 1:
        return "this rank is alone on its host"
    if world.local_size * world.num_nodes != world.size:
        return "the hosts have different numbers of ranks"
    if update.op == "adasum":
        return "op='adasum' is Horovod's"
    if update.process_sets:
        return "process_sets are Horovod's"
    if room is not None and needed > 0.9 * room:
        return f"{needed >> 20} MB of shared memory are needed and /dev/shm has {room >> 20} MB free"
    return ""


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of neighbours whose ``sizes`` add up to ``limit`` at most; a larger one is alone."""
    found: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not found or filled + size > limit:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += size
    return found
