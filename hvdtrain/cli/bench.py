"""``hvdtrain bench``: measure these hosts and this recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench import plots, results, sizes
from hvdtrain.bench.recipes import Wish
from hvdtrain.bench.results import Allreduce, Report, Steps
from hvdtrain.cli import bench_job, bench_show, train_words, where
from hvdtrain.cli.bench_job import Watcher, Where
from hvdtrain.cli.ranges import Seconds
from hvdtrain.cli.work import is_file
from hvdtrain.config import resolve
from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import allocation
from hvdtrain.world import World

EXCHANGES = ("horovod", "shared", "auto")
CARRIERS = ("mpi", "shared", "gloo", "horovod")
_ALL_SIZES = "4..256M"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure how fast ranks sum, hosts talk, and a recipe loads and trains; docs/bench.md says what exactly."""


def _job_options(np: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Where the ranks run, and where the figures go."""
    figures = click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write all figures to a file ('-': stdout)."
    )
    return lambda function: where.options(np)(figures(function))


def _are_here(options: dict[str, Any]) -> bool:
    """Whether nobody names hosts: the ranks then start on this machine."""
    return options["hosts"] is None and options["hostfile"] is None and allocation.from_environment(os.environ) is None


@command.command("allreduce", short_help="Sums over all ranks, by size and by what carries them.")
@click.option(
    "--sizes", "which", default=_ALL_SIZES, show_default=True, metavar="LIST", help="Bytes: 1M,16M or a range of powers of 4."
)
@click.option("--over", default=",".join(CARRIERS), show_default=True, metavar="LIST", help="What carries the sums.")
@click.option(
    "--rounds", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Let the carriers take turns."
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw bus bandwidth over size.")
@_job_options("Number of ranks (default: all slots of the hosts; without hosts 2, as one exchanges nothing).")
def allreduce(which: str, over: str, rounds: int, plot: Path | None, json_path: Path | None, **options: Any) -> int:
    """Time sums over all ranks of 4 bytes to 256 MiB, over MPI, shared memory, Gloo and Horovod.

    Without hosts: 2 ranks on this machine. Under mpirun or srun these ranks measure.
    """
    plan_sizes = sizes.parse(which)
    names = _carriers(over)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot} does not end in .svg", "an SVG file opens in every browser: --plot allreduce.svg")
    if options["np"] == 1:
        raise UsageError("an allreduce needs 2 ranks at least, and -np is 1", "hvdtrain bench allreduce -np 2")
    if options["np"] is None and _are_here(options):
        options["np"] = 2
    from hvdtrain.bench.allreduce import Plan

    plan = Plan(plan_sizes, names, rounds, lenient=which == _ALL_SIZES)
    return _measured("allreduce", plan, Where(where.words(options)), options, json_path, plot)


@command.command("link", short_help="Messages between all pairs of hosts; names the slow ones.")
@_job_options("Number of ranks, of one host (default: one on each host).")
def link(json_path: Path | None, **options: Any) -> int:
    """Time messages between all pairs of hosts, and name the slow ones.

    One rank a host takes part. On one host, between its ranks: hvdtrain bench link -np 2.
    """
    words, slots = where.words(options), None
    if World.from_env().size == 1:
        listed = allocation.hosts(os.environ, options["hosts"], options["hostfile"])
        if listed is not None and len(listed.hosts) > 1:
            if options["np"] is not None:
                raise UsageError("bench link starts one rank on each host: -np has no say", "leave -np out")
            slots = 1
            words = (*words, *(word for host in listed.hosts for word in ("--include", f"{host.address}:0")))
        elif (options["np"] or 1) < 2:
            raise UsageError(
                "a link has two ends, and this is 1 host", "name more: -H node1,node2; or -np 2 for ranks of one host"
            )
    return _measured("link", None, Where(words), options, json_path, slots=slots)


def _options(*found: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(found):
            function = option(function)
        return function

    return decorate


#: The recipe, and what ``hvdtrain train`` is told of it.
_recipe_options = _options(
    click.argument("recipe"),
    click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the recipe."),
    click.option("--batch-size", metavar="N", help="Samples of one update over all ranks.  [default: the recipe's]"),
    click.option("--batch-size-per-rank", metavar="N", help="Samples of one update on each rank."),
    click.option("--loader-workers", metavar="N", help="Processes that load data, as for hvdtrain train."),
    click.option("--prefetch", metavar="N", help="Batches loaded ahead, as for hvdtrain train."),
)
_exchange_options = _options(
    click.option("--compression", metavar="NAME", help="What is sent instead of float32, as for hvdtrain train."),
    click.option("--bucket-mb", metavar="MB", help="Size of the buckets, as for hvdtrain train."),
)


def _wish(recipe: str, settings: tuple[str, ...], options: dict[str, Any]) -> Wish:
    """Raises UsageError at what cannot be told apart from a mistake before the recipe is loaded."""
    pairs = dict(train_words.pair(text) for text in settings)
    names = ("batch_size", "batch_size_per_rank", "compression", "bucket_mb", "loader_workers", "prefetch")
    given = {name: value for name in names if (value := options.pop(name, None)) is not None}
    train_words.judge(resolve(recipe, pairs, given, {}, None), [])
    path = recipe.partition(".py:")[0] + ".py" if ".py:" in recipe else recipe
    if path.endswith(".py") and not is_file(path):
        raise UsageError(
            f"recipe '{path}' does not exist (looked in {Path(path).absolute().parent})", "check the path of the recipe"
        )
    return Wish(recipe, pairs, given)


@command.command("step", short_help="A recipe's step, without and with each exchange.")
@_recipe_options
@_exchange_options
@click.option(
    "--exchange", default="horovod,shared", show_default=True, metavar="LIST", help="Exchanges to compare: also auto."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Jobs of each, taking turns.")
@click.option("--seconds", type=Seconds(0.1), default=3.0, show_default=True, metavar="S", help="Of steps in each job.")
@_job_options("Number of ranks; 1 has no exchange (default: all slots of the hosts; without hosts 2).")
def step(
    recipe: str, settings: tuple[str, ...], exchange: str, rounds: int, seconds: float, json_path: Path | None, **options: Any
) -> int:
    """Time the step of RECIPE without an exchange of gradients and with each one.

    Without an exchange, every rank trains with its own part of the batch by itself; what a step takes more with one is the
    communication that is not hidden. Each exchange has a job of its own, and they take turns.
    """
    names = [name.strip() for name in exchange.split(",") if name.strip()]
    unknown = [name for name in names if name not in EXCHANGES]
    if unknown or not names:
        raise UsageError(
            f"--exchange {shown(exchange)}: there is no exchange {shown(unknown[0] if unknown else exchange)!r}",
            f"known: {', '.join(EXCHANGES)}",
        )
    wish = _wish(recipe, settings, options)
    if World.from_env().size > 1:
        raise UsageError(
            "bench step starts a job for each exchange itself", "leave the launcher out: hvdtrain bench step -np 2 ..."
        )
    if options["np"] is None and _are_here(options):
        options["np"] = 2
    if options["np"] == 1:
        names = []
    from hvdtrain.bench import step as bench_step

    place = Where(where.words(options), alone=options["np"] == 1 and _are_here(options))
    _check(json_path)
    _warn_of_crowd(options)
    runs: list[Steps] = []
    left_out: dict[str, str] = {}
    wanted = [bench_step.NONE, *names]
    with Watcher("bench step", len(wanted) * rounds) as watcher:
        for _ in range(rounds):
            for name in wanted:
                if name in left_out:
                    continue
                watcher.begin(name)
                code = bench_job.run("step", bench_step.Plan(wish, name, seconds), place, watcher)
                if code and (name == bench_step.NONE or len(runs) < 1):
                    return code
                if code:
                    left_out[name] = "its job failed; its words are above"
                elif isinstance(watcher.report, Steps):
                    runs.append(watcher.report)
    report = replace(bench_step.merge(runs), left_out=left_out)
    return _tell(report, json_path)


@command.command("loader", short_help="A recipe's data: its source, the loader, what the step needs.")
@_recipe_options
@_job_options("Number of ranks that load at once (default: all slots of the hosts; without hosts 1).")
def loader(recipe: str, settings: tuple[str, ...], json_path: Path | None, **options: Any) -> int:
    """Time how RECIPE's data comes, from its source and through the loader, and how its step needs it; name the bottleneck."""
    from hvdtrain.bench.loading import Plan

    wish = _wish(recipe, settings, options)
    place = Where(where.words(options), alone=(options["np"] or 1) == 1 and _are_here(options))
    return _measured("loader", Plan(wish), place, options, json_path)


def _measured(
    kind: str,
    plan: Any,
    place: Where,
    options: Mapping[str, Any],
    json_path: Path | None,
    plot: Path | None = None,
    slots: int | None = None,
) -> int:
    """``slots``: of each host, where not all are used."""
    _check(json_path, plot)
    _warn_of_crowd(options, slots)
    with Watcher(f"bench {kind}") as watcher:
        code = bench_job.run(kind, plan, place, watcher)
    if code or watcher.report is None:
        return code
    if plot is not None and isinstance(watcher.report, Allreduce):
        plots.write(plot, plots.bandwidth(watcher.report))
    return _tell(watcher.report, json_path)


def _warn_of_crowd(options: Mapping[str, Any], slots: int | None = None) -> None:
    if World.from_env().size == 1:  # else the other ranks have started already
        hosts = where.hosts(options)
        where.warn_of_crowd(hosts if slots is None else [replace(host, slots=slots) for host in hosts])


def _check(*paths: Path | None) -> None:
    """Raises UsageError if one cannot be written, by rank 0, which does it."""
    if World.from_env().rank == 0:
        for path in paths:
            if path is not None and str(path) != "-":
                results.check(path)


def _tell(report: Report, json_path: Path | None) -> int:
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(results.to_json(report), indent=1))
        return 0
    bench_show.show(report)
    if json_path is not None:
        results.write(json_path, report)
    return 0


def _carriers(over: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in over.split(",") if word.strip()))
    unknown = [name for name in names if name not in CARRIERS]
    if unknown or not names:
        raise UsageError(
            f"--over {shown(over)}: there is no carrier {shown(unknown[0] if unknown else over)!r}",
            f"known: {', '.join(CARRIERS)}",
        )
    return names
