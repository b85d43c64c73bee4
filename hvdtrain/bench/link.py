"""How fast messages go from each host to each other one, and which host or route is slower than the others."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hvdtrain.bench import machine
from hvdtrain.bench.events import Finished, Observer, Progress
from hvdtrain.bench.results import Link, Route, Slow
from hvdtrain.comm import Communicator
from hvdtrain.comm.buffers import Buffers
from hvdtrain.errors import UsageError

#: A host or a route is slow below this part of what the others have.
SLOW = 0.7
#: Up to so many hosts, pairs are measured one at a time; of more, disjoint pairs at once.
_ONE_AT_A_TIME = 8
_FIRST_BYTES, _LAST_BYTES = 64 << 10, 16 << 20
#: A message that takes so long is large enough.
_LONG_S = 0.1
_LATENCY_TRIES, _TRIES = 100, 5

Pair = tuple[int, int]


def measure(comm: Communicator, observe: Observer) -> None:
    """Collective. Between the first ranks of all hosts; on one host between all its ranks.

    Raises:
        UsageError: there are no two ranks, or no MPI.
    """
    world = comm.world
    if world.size < 2:
        raise UsageError("a link has two ends, and this is 1 rank", "hvdtrain bench link -H node1,node2")
    if not comm.shares_memory:
        raise UsageError("bench link sends over MPI, and the ranks meet over Gloo", "leave --gloo out").everywhere()
    ranks = _ends(comm)
    at_once = len(ranks) > _ONE_AT_A_TIME
    schedule = list(tournament(len(ranks)))
    rounds = schedule if at_once else [[pair] for pairs in schedule for pair in pairs]
    names = _names(comm, ranks)

    def begin(done: int, pairs: Sequence[Pair]) -> None:
        more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
        observe(Progress(done, len(rounds), ", ".join(f"{names[a]} and {names[b]}" for a, b in pairs[:3]) + more))

    routes = tuple(_measure(comm, ranks, rounds, begin))
    observe(Finished(Link(machine.setup(comm), routes, tuple(slow(routes)))))


def ring(comm: Communicator) -> list[Route]:
    """Collective. The routes between neighbouring hosts, which a sum over all ranks uses."""
    ranks = _ends(comm)
    pairs = [(place, (place + 1) % len(ranks)) for place in range(len(ranks) if len(ranks) > 2 else 1)]
    return _measure(comm, ranks, [[pair] for pair in pairs], lambda done, pairs: None)


def tournament(count: int) -> Iterator[list[Pair]]:
    """All pairs of ``count``, each once, in rounds in which nobody is in two pairs: the circle method."""
    places = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair)
        places = [places[0], places[-1], *places[1:-1]]


def slow(routes: Sequence[Route]) -> list[Slow]:
    """The hosts, and the routes between other hosts, that are slower than ``SLOW`` of what is usual.

    A host is judged by the best that it sends and receives, so that one slow host, which is an end of many routes, does not make
    the others look slow.
    """
    sends, receives = _best(routes, lambda route: route.source), _best(routes, lambda route: route.target)
    judged: dict[str, list[Slow]] = {}
    for how, best in (("sends", sends), ("receives", receives)):
        usual = statistics.median_high(best.values())
        for host, rate in best.items():
            if len(best) > 2 and rate < SLOW * usual:
                judged.setdefault(host, []).append(Slow(host, how, rate, usual))
    found: list[Slow] = []
    for ways in judged.values():
        worst = min(ways, key=lambda way: way.bytes_per_s)
        found.append(replace(worst, how=" and ".join(way.how for way in ways)))
    explained = {(way.what, way.how) for ways in judged.values() for way in ways}
    for route in routes:
        if {(route.source, "sends"), (route.target, "receives")} & explained:
            continue
        usual = min(sends[route.source], receives[route.target])
        if len(sends) == 2:  # there is but the way back to compare with
            usual = max(other.bytes_per_s for other in routes)
        if route.bytes_per_s < SLOW * usual:
            found.append(Slow(f"{route.source} -> {route.target}", "route", route.bytes_per_s, usual))
    return found


def _best(routes: Sequence[Route], end: Callable[[Route], str]) -> dict[str, float]:
    best: dict[str, float] = {}
    for route in routes:
        best[end(route)] = max(best.get(end(route), 0.0), route.bytes_per_s)
    return best


def _ends(comm: Communicator) -> list[int]:
    """Collective. The ranks between which messages go."""
    is_end = comm.world.num_nodes == 1 or comm.world.local_rank == 0
    return [rank for rank, ends in enumerate(comm.allgather(is_end, name="bench/ends")) if ends]


def _names(comm: Communicator, ranks: Sequence[int]) -> list[str]:
    """Collective. The host of each end; with the rank where hosts have the same name, or are one."""
    hosts = comm.allgather(socket.gethostname(), name="bench/names")
    is_clear = len({hosts[rank] for rank in ranks}) == len(ranks)
    return [hosts[rank] if is_clear else f"{hosts[rank]}/{rank}" for rank in ranks]


def _measure(
    comm: Communicator, ranks: Sequence[int], rounds: Sequence[Sequence[Pair]], begin: Callable[[int, Sequence[Pair]], None]
) -> list[Route]:
    """Collective. Both directions of each pair of places in ``ranks``."""
    names = _names(comm, ranks)
    buffers = Buffers()
    mine: list[Route] = []
    for done, pairs in enumerate(rounds):
        begin(done, pairs)
        for first, second in pairs:
            for source, target in ((first, second), (second, first)):
                if comm.world.rank == ranks[source]:
                    latency, rate, size = _as_sender(buffers, ranks[target])
                    mine.append(Route(names[source], names[target], latency, rate, size))
                elif comm.world.rank == ranks[target]:
                    _as_receiver(buffers, ranks[source])
        buffers.meet_asleep()
    buffers.close()
    return [route for each in comm.allgather(mine, name="bench/routes") for route in each]


def _as_sender(buffers: Buffers, target: int) -> tuple[float, float, int]:
    """Latency (s), bandwidth (bytes/s) and size of the messages that gave it."""
    latency = statistics.median(_there_and_back(buffers, target, np.zeros(1, np.int32), _LATENCY_TRIES)) / 2
    size = _FIRST_BYTES
    while True:
        message = np.zeros(size // 4, np.int32)
        seconds = min(_there_and_back(buffers, target, message, 1)) - latency
        is_last = seconds > _LONG_S or size >= _LAST_BYTES
        buffers.send(np.array([int(is_last)], np.int32), target)
        if is_last:
            break
        size *= 4
    # The fastest: what else the hosts do at the moment is no matter of the link.
    seconds = min(_there_and_back(buffers, target, message, _TRIES)) - latency
    return latency, size / max(seconds, 1e-9), size


def _as_receiver(buffers: Buffers, source: int) -> None:
    _and_back(buffers, source, np.empty(1, np.int32), _LATENCY_TRIES)
    size, is_last = _FIRST_BYTES, np.zeros(1, np.int32)
    while True:
        message = np.empty(size // 4, np.int32)
        _and_back(buffers, source, message, 1)
        buffers.receive(is_last, source)
        if is_last[0]:
            break
        size *= 4
    _and_back(buffers, source, message, _TRIES)


def _there_and_back(buffers: Buffers, target: int, message: NDArray[np.int32], tries: int) -> list[float]:
    """Seconds, at each try, until ``target`` has the message and its answer of 4 bytes is here. The first try opens connections."""
    seconds = []
    for _ in range(tries + 1):
        started = time.perf_counter()
        buffers.send(message, target)
        buffers.await_mark(target)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _and_back(buffers: Buffers, source: int, message: NDArray[np.int32], tries: int) -> None:
    for _ in range(tries + 1):
        buffers.receive(message, source)
        buffers.mark(source)
