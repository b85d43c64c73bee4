"""What benchmarks found, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hvdtrain.bench import sizes
from hvdtrain.bench.results import Allreduce, Link, Loading, Report, Setup, Steps

#: Through a pipe a table is as wide as it needs to be.
_PIPE_COLUMNS = 140


def show(report: Report) -> None:
    """Print ``report`` to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    if isinstance(report, Allreduce):
        _allreduce(console, report)
    elif isinstance(report, Link):
        _link(console, report)
    elif isinstance(report, Steps):
        _steps(console, report)
    else:
        _loading(console, report)


def _allreduce(console: Console, report: Allreduce) -> None:
    table = _table("size", "over", "median", "fastest", "quartiles", "algorithm", "bus", "of limit", left=2)
    limits = {limit.bytes: limit for limit in report.limits}
    for size in sorted({each.bytes for each in report.sums}):
        here = [each for each in report.sums if each.bytes == size]
        best = min(here, key=lambda each: each.timing.median_s)
        for each in here:
            taken, share = each.timing, each.share_of_limit
            table.add_row(
                sizes.text(size) if each is here[0] else "",
                each.carrier,
                seconds(taken.median_s),
                seconds(taken.fastest_s),
                f"{seconds(taken.low_s)} - {seconds(taken.high_s)}",
                rate(each.algorithm_bytes_per_s),
                rate(each.bus_bytes_per_s),
                "" if share is None else f"{share:.0%}",
                style="bold" if each is best and len(here) > 1 else None,
            )
        if size in limits:
            limit = limits[size]
            table.add_row("", f"limit: {limit.of}", seconds(limit.seconds), style="dim")
        table.add_section()
    console.print(f"allreduce of float32 on {_where(report.setup)}: time of the slowest rank", soft_wrap=True)
    console.print(table)
    for name, about in report.carriers.items():
        console.print(f"{name}: {about}", soft_wrap=True, markup=False)
    for name, why in report.left_out.items():
        console.print(f"{name} was left out: {why}", soft_wrap=True, markup=False)


def _link(console: Console, report: Link) -> None:
    hosts = list(dict.fromkeys([*(route.source for route in report.routes), *(route.target for route in report.routes)]))
    found = {(route.source, route.target): route for route in report.routes}
    matrix = len(hosts) <= 8 and len(hosts) > 2
    table = _table("from \\ to", *hosts) if matrix else _table("from", "to", "latency", "bandwidth", left=2)
    if matrix:
        for source in hosts:
            routes = [found.get((source, target)) for target in hosts]
            table.add_row(
                source, *("" if route is None else f"{seconds(route.latency_s)}, {rate(route.bytes_per_s)}" for route in routes)
            )
    else:
        for route in sorted(report.routes, key=lambda route: route.bytes_per_s):
            table.add_row(route.source, route.target, seconds(route.latency_s), rate(route.bytes_per_s))
    console.print(f"links on {_where(report.setup)}: one-way latency of 4 bytes, bandwidth of large messages", soft_wrap=True)
    console.print(table)
    for slow in report.slow:
        what = f"{slow.what} is slow" if slow.how == "route" else f"{slow.what} {slow.how} slowly"
        console.print(
            f"{what}: {rate(slow.bytes_per_s)}, where {rate(slow.usual_bytes_per_s)} are usual", style="yellow", soft_wrap=True
        )
    if not report.slow:
        console.print(
            "no host and no route is slower than 0.7 of what is usual" if len(hosts) > 2 else "both directions are alike"
        )


def _steps(console: Console, report: Steps) -> None:
    has_update = any(step.update_s is not None for step in report.steps)
    names = ("data wait", "compute", "update") if has_update else ("data wait", "compute and update")
    rounds = max(len(step.rounds_s) for step in report.steps)
    table = _table("exchange", "step", *(["rounds"] if rounds > 1 else []), "fastest", *names, "exposed", "samples/s")
    base = next((step for step in report.steps if step.exposed_s is None), None)
    for step in report.steps:
        phases = [step.data_s, step.compute_s, *([step.update_s] if has_update and step.update_s is not None else [])]
        exposed = (
            ""
            if step.exposed_s is None or base is None
            else f"{_signed(step.exposed_s)} ({step.exposed_s / base.step.median_s:+.0%})"
        )
        table.add_row(
            step.exchange,
            seconds(step.step.median_s),
            *([f"{seconds(min(step.rounds_s))} - {seconds(max(step.rounds_s))}"] if rounds > 1 else []),
            seconds(step.step.fastest_s),
            *map(seconds, phases),
            exposed,
            f"{step.samples_per_s:,.0f}",
        )
    console.print(
        f"step of {report.recipe} ({report.framework}, global batch {report.batch_size}) on {_where(report.setup)}",
        soft_wrap=True,
    )
    console.print(table)
    if rounds == 1 and len(report.steps) > 1:
        console.print("one round: it cannot tell a difference from the machine's moods, more of them can (--rounds 3)")
    for step in report.steps:
        if step.chosen:
            console.print(f"{step.exchange}: {step.chosen}", soft_wrap=True, markup=False)
    for name, why in report.left_out.items():
        console.print(f"{name} was left out: {why}", soft_wrap=True, markup=False)


def _loading(console: Console, report: Loading) -> None:
    table = _table("", "samples/s", "times the need")
    rates = {
        "source alone": report.source_per_s,
        "through the loader": report.loader_per_s,
        "needed by the step": report.step_per_s,
    }
    for name, value in rates.items():
        table.add_row(name, f"{value:,.0f}", f"{value / report.step_per_s:.2f}")
    console.print(
        f"data of {report.recipe} ({report.framework}, global batch {report.batch_size}) on {_where(report.setup)}",
        soft_wrap=True,
    )
    console.print(table)
    if report.way:
        console.print(f"the loader: {report.way}", soft_wrap=True, markup=False)
    verdict = {
        "step": "the step is the bottleneck: loading keeps up with it",
        "source": "the source is the bottleneck: it gives less than a step needs",
        "loader": "the loader is the bottleneck: it loses much of what the source gives",
    }[report.bottleneck]
    console.print(verdict, style="bold" if report.bottleneck == "step" else "yellow", soft_wrap=True)


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def _table(*names: str, left: int = 1) -> Table:
    """The first ``left`` columns hold text."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table


def _where(setup: Setup) -> str:
    hosts = f"{setup.nodes} hosts" if setup.nodes > 1 else setup.hosts[0]
    return f"{setup.ranks} {'ranks' if setup.ranks > 1 else 'rank'} of {hosts} ({setup.cpu}, {setup.cores} cores)"


def seconds(value: float) -> str:
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{_three(value * factor)} {unit}"
    return f"{_three(value)} s"


def rate(bytes_per_s: float) -> str:
    for limit, factor, unit in ((1e6, 1e-3, "kB/s"), (1e9, 1e-6, "MB/s")):
        if bytes_per_s < limit:
            return f"{_three(bytes_per_s * factor)} {unit}"
    return f"{_three(bytes_per_s * 1e-9)} GB/s"


def _three(value: float) -> str:
    """Three digits that count."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
