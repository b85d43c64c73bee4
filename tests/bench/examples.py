"""Reports as benchmarks give them."""

from __future__ import annotations

from hvdtrain.bench.results import Allreduce, Limit, Link, Route, Setup, Step, Steps, Sum, Timing

SETUP = Setup(1.5, ("a", "a", "b"), "open mpi", "a cpu", 2, 1 << 30, 1, {"numpy": "2.4"})


def sums(carrier: str, bytes_per_s: float) -> tuple[Sum, ...]:
    return tuple(
        Sum(carrier, size, Timing.of([size / bytes_per_s]), (size / bytes_per_s,), bytes_per_s, 4 / 3 * bytes_per_s, 0.5)
        for size in (4, 1 << 20)
    )


ALLREDUCE = Allreduce(
    SETUP,
    (*sums("mpi", 1e9), *sums("shared", 4e9)),
    (Limit(1 << 20, 1e-3, "memory", (1e-3,)),),
    {"mpi": "MPI", "shared": "a window"},
    {},
)


def routes(rates: dict[tuple[str, str], float]) -> list[Route]:
    return [Route(source, target, 1e-5, rate, 1 << 20) for (source, target), rate in rates.items()]


LINK = Link(SETUP, tuple(routes({("a", "b"): 1e9, ("b", "a"): 1e8})), ())


def step(exchange: str, rounds_s: tuple[float, ...], exposed_s: float | None = None) -> Step:
    return Step(exchange, "", Timing.of(rounds_s), rounds_s, 1e-4, 1e-2, 1e-3, exposed_s, 1000.0)


STEPS = Steps(
    SETUP,
    "recipe.py",
    {},
    "torch",
    64,
    (step("none", (0.010, 0.011, 0.012)), step("horovod", (0.013, 0.014, 0.015), 0.003)),
    {},
)
