"""``hvdtrain bench``: measure these hosts and this recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench import results, sizes
from hvdtrain.cli import bench_job
from hvdtrain.cli.bench_job import Watcher, Where
from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import allocation
from hvdtrain.world import World

CARRIERS = ("mpi", "shared", "gloo", "horovod")
_ALL_SIZES = "4..256M"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure how fast ranks sum, hosts talk, and a recipe loads and trains; docs/bench.md says what exactly."""


def _where_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``hvdtrain run`` that say where ranks run; all others can be set for ``hvdtrain run`` in its own words."""
    for option in reversed(
        (
            click.option("-np", "--num-proc", "np", type=click.IntRange(1), metavar="N", help="Number of ranks."),
            click.option("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-16]:4."),
            click.option("--hostfile", metavar="FILE", help="Hosts and slots in a file; any dialect."),
            click.option("--launcher", metavar="NAME", help="What starts the ranks, as for hvdtrain run."),
            click.option("--gloo", is_flag=True, help="Let the ranks meet over Gloo instead of MPI."),
            click.option("--nic", multiple=True, metavar="NAME", help="Network interface to use on all hosts."),
            click.option("--oversubscribe", is_flag=True, help="Allow more ranks than slots."),
            click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Pass a variable to the ranks."),
            click.option(
                "--json", "json_path", type=click.Path(path_type=Path), help="Write all figures to a file ('-': stdout)."
            ),
        )
    ):
        function = option(function)
    return function


def _words(options: dict[str, Any]) -> tuple[str, ...]:
    """The options as ``hvdtrain run`` takes them."""
    words: list[str] = []
    for name, flag in (("np", "-np"), ("hosts", "-H"), ("hostfile", "--hostfile"), ("launcher", "--launcher")):
        if options[name] is not None:
            words += [flag, str(options[name])]
    for name in ("nic", "env"):
        for value in options[name]:
            words += [f"--{name}", value]
    return (*words, *(f"--{name}" for name in ("gloo", "oversubscribe") if options[name]))


def _are_here(options: dict[str, Any]) -> bool:
    """Whether nobody names hosts: the ranks then start on this machine."""
    return options["hosts"] is None and options["hostfile"] is None and allocation.from_environment(os.environ) is None


@command.command("allreduce")
@click.option(
    "--sizes", "which", default=_ALL_SIZES, show_default=True, metavar="LIST", help="Bytes: 1M,16M or a range of powers of 4."
)
@click.option("--over", default=",".join(CARRIERS), show_default=True, metavar="LIST", help="What carries the sums.")
@click.option(
    "--rounds", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Let the carriers take turns."
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw bus bandwidth over size.")
@_where_options
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
    return _measured("allreduce", plan, Where(_words(options)), json_path, plot)


@command.command("link")
@_where_options
def link(json_path: Path | None, **options: Any) -> int:
    """Time messages between all pairs of hosts, and name the slow ones.

    One rank a host takes part. On one host, between its ranks: hvdtrain bench link -np 2.
    """
    from hvdtrain.bench.link import Plan

    words = _words(options)
    if World.from_env().size == 1:
        listed = allocation.hosts(os.environ, options["hosts"], options["hostfile"])
        if listed is not None and len(listed.hosts) > 1:
            if options["np"] is not None:
                raise UsageError("bench link starts one rank on each host: -np has no say", "leave -np out")
            words = (*words, *(word for host in listed.hosts for word in ("--include", f"{host.address}:0")))
        elif (options["np"] or 1) < 2:
            raise UsageError(
                "a link has two ends, and this is 1 host", "name more: -H node1,node2; or -np 2 for ranks of one host"
            )
    return _measured("link", Plan(), Where(words), json_path)


def _measured(kind: str, plan: Any, where: Where, json_path: Path | None, plot: Path | None = None) -> int:
    with Watcher(f"bench {kind}") as watcher:
        code = bench_job.run(kind, plan, where, watcher)
    report = watcher.report
    if code or report is None:
        return code
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(results.to_json(report), indent=1))
    else:
        from hvdtrain.cli import bench_show

        bench_show.show(report)
        if json_path is not None:
            results.write(json_path, report)
    if plot is not None and isinstance(report, results.Allreduce):
        from hvdtrain.bench import plots

        plots.write(plot, plots.bandwidth(report))
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
