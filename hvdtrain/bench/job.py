"""Run a benchmark as one rank of a job: ``python -m hvdtrain.bench.job KIND PLAN`` is what the launcher starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.bench import allreduce, events, link, results
from hvdtrain.bench.events import Event, Observer
from hvdtrain.comm import Communicator
from hvdtrain.comm.connect import connect
from hvdtrain.rank import Rank, guard
from hvdtrain.world import World

#: kind of report -> its plan, and what measures it
KINDS: dict[str, tuple[type, Callable[[Communicator, Any, Observer], None]]] = {
    "allreduce": (allreduce.Plan, allreduce.measure),
    "link": (link.Plan, link.measure),
}


def run(kind: str, plan: Any, observe: Observer) -> int:
    """Collective. Measure as one rank of the job that the environment tells of; the exit code.

    ``observe`` is called on rank 0 only.
    """

    def body(rank: Rank) -> None:
        rank.world = World.from_env()
        rank.comm = connect(rank.world, "numpy")
        rank.world = rank.comm.world
        _, measure = KINDS[kind]
        measure(rank.comm, plan, observe if rank.world.is_primary else _nobody)

    return guard(body)


def argv(kind: str, plan: Any) -> list[str]:
    """The arguments of this module that ``main`` takes."""
    return [kind, json.dumps(asdict(plan))]


def parse(kind: str, values: Mapping[str, Any]) -> Any:
    """A plan as ``argv`` wrote it."""
    return results.build(KINDS[kind][0], values)


def main(arguments: Sequence[str]) -> int:
    kind, plan = arguments
    return run(kind, parse(kind, json.loads(plan)), _print)


def _print(event: Event) -> None:
    print(events.encode(event), flush=True)


def _nobody(event: Event) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
