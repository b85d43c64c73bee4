"""How long sums over all ranks take, by size and by what carries them, and how near that is to what the hardware can do."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from hvdtrain.bench import carriers, limits, link, machine, timing
from hvdtrain.bench.carriers import Buffer
from hvdtrain.bench.events import Finished, Note, Observer, Progress
from hvdtrain.bench.results import Allreduce, Limit, Sum, Timing
from hvdtrain.bench.sizes import text
from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError, UsageError

#: of a rank's memory that is free, for its array and what a carrier needs beside it
_MOST_OF_MEMORY = 0.8
_COPIES = 4


@dataclass(frozen=True)
class Plan:
    #: bytes, of float32
    sizes: tuple[int, ...]
    #: carriers
    over: tuple[str, ...]
    #: how often all of it is done: carriers take turns
    rounds: int = 1
    budget_s: float = 0.3
    #: whether sizes that do not fit into memory are left out, else they are an error
    lenient: bool = False


def measure(comm: Communicator, plan: Plan, observe: Observer) -> None:
    """Collective. ``observe`` is called on all ranks.

    Raises:
        UsageError: there is one rank, no carrier, or too little memory.
    """
    world = comm.world
    if world.size < 2:
        raise UsageError("an allreduce needs 2 ranks at least, and this is 1", "hvdtrain bench allreduce -np 2")
    sizes = _fitting(comm, plan, observe)
    names, left_out = carriers.usable(comm, [name for name in carriers.KINDS if name in plan.over], sizes[-1])
    if not names:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UsageError(f"nothing is left to measure: {reasons}", "name others: --over mpi,horovod,gloo,shared").everywhere()
    is_linked = world.num_nodes > 1 and comm.shares_memory
    large = [size for size in sizes if size >= limits.LEAST_BYTES and (is_linked or world.num_nodes == 1)]
    total = plan.rounds * (len(sizes) * len(names) + len(large)) + is_linked
    done = 0

    def begin(what: str) -> None:
        nonlocal done
        observe(Progress(done, total, what))
        done += 1

    bandwidth = None
    if is_linked:
        begin("the links between the hosts")
        bandwidth = min(route.bytes_per_s for route in link.ring(comm))
    about: dict[str, str] = {}
    seconds: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    least: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(plan.rounds):
        for size in large:
            begin(f"the limit of {text(size)}")
            least[size].append(limits.memory_s(comm, size))
        for name in names:
            carrier = carriers.KINDS[name].open(comm)
            about[name] = carrier.about
            for size in sizes:
                begin(f"{name}, {text(size)}")
                buffer = carrier.buffer(size // 4)
                _check(comm, name, buffer)
                seconds[name, size].append(timing.tries(comm, buffer.reduce, budget_s=plan.budget_s))
                buffer.close()
            carrier.close()
    bounds = {size: _limit(size, least[size], world.num_nodes, bandwidth) for size in large}
    sums = tuple(_sum(world.size, name, size, seconds[name, size], bounds.get(size)) for size in sizes for name in names)
    report = Allreduce(machine.setup(comm), sums, tuple(bounds.values()), about, left_out)
    observe(Finished(report))


def _limit(size: int, memory_s: list[tuple[float, float]], nodes: int, bytes_per_s: float | None) -> Limit:
    in_place, copies = zip(*memory_s, strict=True)
    memory = Limit(size, statistics.median(in_place), "memory", in_place, statistics.median(copies))
    if bytes_per_s is None:
        return memory
    network_s = limits.network_s(size, nodes, bytes_per_s)
    return memory if memory.seconds > network_s else Limit(size, network_s, "network", (network_s,))


def _sum(ranks: int, name: str, size: int, rounds: list[list[float]], limit: Limit | None) -> Sum:
    taken = Timing.of([seconds for each in rounds for seconds in each])
    rate = size / taken.median_s
    return Sum(
        carrier=name,
        bytes=size,
        timing=taken,
        rounds_s=tuple(statistics.median(each) for each in rounds),
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=2 * (ranks - 1) / ranks * rate,
        share_of_limit=None if limit is None else limit.seconds / taken.median_s,
    )


def _fitting(comm: Communicator, plan: Plan, observe: Observer) -> list[int]:
    """Collective. The sizes for which every host has the memory."""
    mine = _MOST_OF_MEMORY * machine.free_bytes() / comm.world.local_size / _COPIES
    most = int(comm.allreduce([mine], name="bench/memory", op="min")[0])
    sizes = [size for size in plan.sizes if size <= most]
    if len(sizes) < len(plan.sizes):
        lost = text(plan.sizes[len(sizes)])
        why = f"{lost} is too large: each rank needs {_COPIES} times as much, and {text(most * _COPIES)} are free for each"
        if not (plan.lenient and sizes):
            raise UsageError(why, "use fewer ranks on a host, or smaller --sizes").everywhere()
        observe(Note(f"{why}; it is left out"))
    return sizes


def _check(comm: Communicator, name: str, buffer: Buffer) -> None:
    """Collective. That the sum is right; the array is all zeros then."""
    buffer.array[:] = comm.world.rank + 1
    expected = comm.world.size * (comm.world.size + 1) // 2
    total = buffer.reduce()
    if not (total == expected).all():
        raise HvdtrainError(f"the sum over {name} is wrong: {float(total[total != expected][0])} instead of {expected}")
    buffer.array[:] = 0
