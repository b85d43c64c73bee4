"""Where a rank is, and what its place gives it: threads, GPUs. Decided on the rank's host; standard library only."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.launch import defaults, resources
from hvdtrain.world import LAUNCHERS

#: The names that launchers write a rank's place to, in the order of trust. torchrun starts none of our relays.
_TOLD = tuple(names for source, names in LAUNCHERS.items() if source != "torchrun")


class DeviceError(Exception):
    """The host has fewer GPUs than ranks."""


@dataclass(frozen=True)
class Place:
    """A rank's place by the plan, as far as the rank's host needs it: the hosts' names it does not."""

    rank: int
    node_rank: int
    local_rank: int
    local_size: int


def rank_of(environ: Mapping[str, str]) -> int:
    return next((int(environ[names[0]]) for names in _TOLD if environ.get(names[0], "").isdigit()), 0)


def place_of(rank: int, slots: Sequence[int]) -> Place:
    first = 0
    for node_rank, count in enumerate(slots):
        if rank < first + count:
            return Place(rank, node_rank, rank - first, count)
        first += count
    return Place(rank, len(slots), 0, 1)  # more ranks than were planned: say so to the launcher, do not guess


def as_started(place: Place, environ: Mapping[str, str]) -> Place:
    """The place with what the launcher says about this host, where it says it; an elastic job may differ from any plan."""
    for _, _, rank_name, size_name, *_ in _TOLD:
        if environ.get(rank_name, "").isdigit() and environ.get(size_name, "").isdigit():
            return replace(place, local_rank=int(environ[rank_name]), local_size=int(environ[size_name]))
    return place


def host_name(environ: Mapping[str, str]) -> str:
    """This host's name; Slurm's for it where Slurm started us."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def environment_for(place: Place, environ: Mapping[str, str], cpus: int, devices: str, *, share: bool) -> dict[str, str]:
    """What the rank gets beside its inherited environment; what the user has set stays.

    ``devices`` are the chosen device numbers of all hosts, ``0,1;2``; empty where none were chosen.

    Raises:
        DeviceError: two ranks would use one GPU.
    """
    extra = {each.name: each.value for each in settings(environ, cpus, place.local_size)}
    chosen = devices.split(";")[place.node_rank] if devices and place.node_rank < devices.count(";") + 1 else ""
    if chosen:
        extra["CUDA_VISIBLE_DEVICES"] = ",".join(cuda_names([int(number) for number in chosen.split(",")], environ))
    seen = resources.gpus({**environ, **extra})
    if seen and place.local_size > len(seen) and not share and not resources.gpus_are_bound(environ):
        raise DeviceError(
            f"rank {place.rank}: local rank {place.local_rank} of {place.local_size}, but the host offers {len(seen)} GPUs "
            f"({', '.join(seen)})"
        )
    return extra


def settings(environ: Mapping[str, str], cpus: int, local_size: int) -> tuple[defaults.Setting, ...]:
    """The defaults that a rank gets on this host, which has so many CPUs and ranks. ``environ`` has what the user has set."""
    threads = environ.get("OMP_NUM_THREADS", "")
    facts = defaults.HostFacts(
        threads=int(threads) if threads.isdigit() else resources.threads_per_rank(cpus, local_size),
        over_mpi=environ.get("HOROVOD_CONTROLLER") != "gloo",
        glibc=() if defaults.tunes_malloc(environ) else defaults.glibc(),
    )
    return defaults.unset(defaults.of_host(facts), environ)


def cuda_names(chosen: Sequence[int], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names under which CUDA knows the chosen devices: their numbers count what CUDA_VISIBLE_DEVICES shows, where it is set.

    Raises:
        DeviceError: it does not show that many.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return tuple(map(str, chosen))
    visible = resources.gpus(environ)
    beyond = next((number for number in chosen if number >= len(visible)), None)
    if beyond is not None:
        raise DeviceError(f"device {beyond} was chosen, but CUDA_VISIBLE_DEVICES shows {len(visible)}: {', '.join(visible)}")
    return tuple(visible[number] for number in chosen)
