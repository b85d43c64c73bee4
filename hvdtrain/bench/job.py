"""Run a benchmark as one rank of a job: ``python -m hvdtrain.bench.job KIND PLAN`` is what the launcher starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.bench import allreduce, events, link, loading, results, step
from hvdtrain.bench.events import Event, Observer
from hvdtrain.bench.recipes import Built
from hvdtrain.comm.connect import connect
from hvdtrain.rank import Rank, guard
from hvdtrain.world import World


@dataclass(frozen=True)
class Kind:
    """A benchmark: what it is told (None: nothing), and how it is done. Of a recipe, ``measure`` gets it as well."""

    plan: type | None
    measure: Callable[..., None]
    of_recipe: bool = False


KINDS = {
    "allreduce": Kind(allreduce.Plan, allreduce.measure),
    "link": Kind(None, link.measure),
    "step": Kind(step.Plan, step.measure, of_recipe=True),
    "loader": Kind(loading.Plan, loading.measure, of_recipe=True),
}


def run(kind: str, plan: Any, observe: Observer) -> int:
    """Collective. Measure as one rank of the job that the environment tells of; the exit code.

    ``observe`` is called on rank 0 only.
    """

    def body(rank: Rank) -> None:
        rank.world = World.from_env()
        built = [Built.of(plan.wish, rank.world)] if KINDS[kind].of_recipe else []
        rank.comm = connect(rank.world, built[0].framework if built else "numpy")
        rank.world = rank.comm.world
        told = [] if plan is None else [plan]
        KINDS[kind].measure(rank.comm, *told, *built, observe if rank.world.is_primary else _nobody)

    return guard(body)


def argv(kind: str, plan: Any) -> list[str]:
    """The arguments of this module that ``main`` takes."""
    return [kind, json.dumps(None if plan is None else asdict(plan))]


def parse(kind: str, values: Mapping[str, Any] | None) -> Any:
    """A plan as ``argv`` wrote it."""
    plan = KINDS[kind].plan
    return None if plan is None else results.build(plan, values)


def main(arguments: Sequence[str]) -> int:
    kind, plan = arguments
    return run(kind, parse(kind, json.loads(plan)), _print)


def _print(event: Event) -> None:
    print(events.encode(event), flush=True)


def _nobody(event: Event) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
