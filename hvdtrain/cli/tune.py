"""``hvdtrain tune``: find the settings under which a recipe's step is fastest on these hosts, and store them."""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvdtrain.bench.recipes import Wish
from hvdtrain.cli import bench_show, forecast, train_words, where
from hvdtrain.cli.ranges import Seconds
from hvdtrain.cli.work import is_file
from hvdtrain.config import Config, seconds
from hvdtrain.errors import JobError, UsageError, shown
from hvdtrain.launch import (
    Controller,
    Host,
    defaults,
    detect,
    environment,
    placement,
    resources,
)
from hvdtrain.tune import search, space, store, tries
from hvdtrain.tune.search import Ask, Comparison, Factor, Failed, Interrupted, Measured, Outcome, Reply
from hvdtrain.tune.space import Facts
from hvdtrain.world import World

#: The options of ``hvdtrain train`` that a step hangs on.
_OF_STEP = (
    *("batch_size", "batch_size_per_rank", "share", "seed", "lr_scale"),
    *("exchange", "compression", "bucket_mb", "loader_workers", "prefetch"),
)
_INTERRUPTED = 128 + signal.SIGINT


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE [TRAIN OPTIONS]")
@click.option("--budget", default="5m", show_default=True, metavar="TIME", help="All tries together: 90s, 5m, 1h.")
@click.option("--over", default=",".join(space.NAMES), show_default=True, metavar="LIST", help="What is searched.")
@click.option("--allow-compression", is_flag=True, help="Search compression too, which changes what is computed.")
@click.option(
    "--seconds", "step_s", type=Seconds(0.1), default=2.0, show_default=True, metavar="S", help="Of steps in each try."
)
@where.options("Number of ranks (default: as hvdtrain run, which is to find the result: all slots; without hosts 1).")
def command(words: tuple[str, ...], budget: str, over: str, allow_compression: bool, step_s: float, **options: Any) -> int:
    """Find the settings under which RECIPE's step is fastest on these hosts, and store them for `hvdtrain run`.

    Each try is a short job of the recipe, started as `hvdtrain run` starts it. TRAIN OPTIONS, such as --set and --batch-size, are
    those of `hvdtrain train`; what they set is not searched. docs/tune.md says how it searches and what is stored.
    """
    budget_s, names = _seconds(budget), _names(over, allow_compression=allow_compression)
    if World.from_env().size > 1:
        raise UsageError("tune starts its jobs itself", "leave the launcher out: hvdtrain tune RECIPE.py -np 2")
    config = _config(words)
    hosts, controller = where.hosts(options), _controller(options)
    train_words.judge(config, hosts)
    forecast.choice(config.options.exchange_wanted, hosts, controller, elastic=False)
    found = detect.look(os.environ)
    facts = _facts(config, hosts, controller, found, options)
    factors, left_out = space.factors(names, facts)
    if not allow_compression:
        left_out.pop(((space.CHANGES_RESULTS, ""),), None)
    key = store.key(config, hosts, controller, str(found.mpi or ""))
    job = tries.Job(_wish(config), ("--no-tuned", *where.words(options)), _variables(facts), step_s)
    told = Teller(budget_s, factors)
    if any(factor.values for factor in factors):
        store.check(key.path())
        where.warn_of_crowd(hosts)
        outcome = _drive(search.search(factors, budget_s), job, told)
    else:
        outcome = Outcome((), None, (), 0.0)
    if outcome.failure:
        longer = "; if it may take that long, raise --budget" if outcome.spent_s >= budget_s else ""
        raise JobError(
            f"the defaults cannot be measured: {outcome.failure}", f"hvdtrain bench step shows all that a job says{longer}"
        )
    _show(outcome, left_out)
    if outcome.is_decided:
        _store(key, outcome)
    _conclude(outcome, budget_s, key, sum(facts.slots))
    if outcome.ended_by == "interrupt":
        return _INTERRUPTED
    return 0 if outcome.is_decided or not outcome.arms else 1


class Teller:
    """Says on stderr what is tried, and what it gave: beside a live line on a terminal, alone through a pipe."""

    def __init__(self, budget_s: float, factors: Sequence[Factor]) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._budget_s, self._began = budget_s, time.monotonic()
        self._factors, self._is_first = factors, True

    def trying(self, ask: Ask) -> Progress | nullcontext[None]:
        """The live line while this is open."""
        if not self._console.is_terminal:
            return nullcontext()
        columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        live = Progress(*columns, console=self._console, transient=True)
        live.add_task(f"{self._clock()} {ask.stage}: {space.text(ask.settings)}", total=None)
        return live

    def tried(self, ask: Ask, reply: Reply) -> None:
        if isinstance(reply, Interrupted):
            result = "interrupted"
        else:
            result = f"left out: {reply.reason}" if isinstance(reply, Failed) else bench_show.seconds(reply.step_s)
        text = f"{self._clock()} {ask.stage}: {space.text(ask.settings)}: {result}"
        self._console.print(text, markup=False)
        if self._is_first and isinstance(reply, Measured):
            self._is_first = False
            ahead = search.forecast(self._factors, [reply.took_s])
            self._console.print(
                f"that job took {reply.took_s:.0f} s; if the next ones do, --budget {_budget(ahead.least_s)} is the least that can "
                f"find something out, and {_budget(ahead.whole_s)} is usually enough for all there is to try"
            )

    def _clock(self) -> str:
        return f"{_minutes(time.monotonic() - self._began)} of {_minutes(self._budget_s)}"


def _drive(asks: Any, job: tries.Job, told: Teller) -> Outcome:
    """Do what the search asks for, until it knows enough or the user interrupts."""
    ask: Ask = next(asks)
    with _signals_interrupt():
        try:
            while True:
                reply: Reply
                try:
                    with told.trying(ask):
                        reply = tries.run(job.argv(ask), ask.limit_s)
                except KeyboardInterrupt:
                    reply = Interrupted()
                told.tried(ask, reply)
                ask = asks.send(reply)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Other ways to end us are as good as Ctrl-C, unless they are ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise UsageError(f"--budget: {error}", "--budget 5m") from None


def _names(over: str, *, allow_compression: bool) -> list[str]:
    names = [name.strip() for name in over.split(",") if name.strip()]
    unknown = [name for name in names if name not in space.NAMES]
    if unknown or not names:
        raise UsageError(
            f"--over {shown(over)}: there is no {shown(unknown[0] if unknown else over)!r} to search",
            f"known: {', '.join(space.NAMES)}",
        )
    if names == [space.CHANGES_RESULTS] and not allow_compression:
        raise UsageError(
            "compression changes what is computed, and is searched only when that is allowed", "add --allow-compression"
        )
    return names if allow_compression else [name for name in names if name != space.CHANGES_RESULTS]


def _config(words: tuple[str, ...]) -> Config:
    config = train_words.config(click.get_current_context(), words, os.environ)
    path = config.recipe.partition(":")[0]
    if path.endswith(".py") and not is_file(path):
        raise UsageError(f"recipe '{path}' does not exist (looked in {os.getcwd()})", "check the path of the recipe")
    return config


def _wish(config: Config) -> Wish:
    given = {name: getattr(config.options, name) for name in _OF_STEP if name in space.given(config.origins)}
    return Wish(config.recipe, dict(config.settings), given)


def _controller(options: Mapping[str, Any]) -> Controller:
    return "gloo" if options["gloo"] else "mpi"


def _facts(
    config: Config, hosts: tuple[Host, ...], controller: Controller, found: detect.Found, options: Mapping[str, Any]
) -> Facts:
    environ = {**os.environ, **environment.select(os.environ, options["env"]).values}
    cpus = resources.usable_cpus(resources.affinity())
    of_host = {each.name: each.value for each in placement.settings(environ, cpus, hosts[0].slots)}
    return Facts(
        slots=tuple(host.slots for host in hosts),
        cpus=cpus,
        threads=int(of_host.get("OMP_NUM_THREADS", 1)),
        no_mpi=_no_mpi(controller, found, environ),
        over_mpi=controller == "mpi",
        compression=config.options.compression,
        options=space.given(config.origins),
        variables=frozenset(environ),
    )


def _no_mpi(controller: Controller, found: detect.Found, environ: Mapping[str, str]) -> str:
    """Why Open MPI's choice of an allreduce is not ours to change; empty if it is."""
    if controller == "gloo":
        return "the ranks meet over Gloo"
    if found.mpi is None or found.mpi.kind != "openmpi":
        return "it is for Open MPI, which is not here"
    files = defaults.parameter_files(found.mpi.prefix, environ.get("HOME", found.home))
    return "Open MPI is told already how it is to sum" if defaults.chooses_algorithms(environ, (), files) else ""


def _variables(facts: Facts) -> dict[str, str]:
    """What ranks get for training a recipe only: a try is a program to ``hvdtrain run``."""
    plain = {each.name for each in defaults.of_job(defaults.JobFacts())}
    of_recipe = defaults.of_job(defaults.JobFacts(is_recipe=True))
    return {each.name: each.value for each in of_recipe if each.name not in plain and each.name not in facts.variables}


def _show(outcome: Outcome, left_out: Mapping[search.Settings, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, width=140, soft_wrap=True)
    table = Table("", "settings", box=None, header_style="dim", pad_edge=False)
    for title in ("tries", "median", "fastest", "to the first"):
        table.add_column(title, justify="right")
    stage, first_s = "", 0.0
    for arm in outcome.arms:
        median_s = statistics.median(arm.rounds_s)
        if arm.stage != stage:
            first_s = median_s
        times = bench_show.seconds(median_s), bench_show.seconds(min(arm.rounds_s))
        table.add_row(
            arm.stage if arm.stage != stage else "",
            space.text(arm.settings),
            str(len(arm.rounds_s)),
            *times,
            f"{median_s / first_s:.2f}",
        )
        stage = arm.stage
    if table.rows:
        console.print(table)
    for settings, why in {**left_out, **dict(outcome.left_out)}.items():
        console.print(f"{space.text(settings)} was left out: {why}", markup=False)


def _store(key: store.Key, outcome: Outcome) -> None:
    compared = outcome.comparison
    ratio = compared.ratio if compared is not None and outcome.settings else 1.0
    tuned = store.Tuned(outcome.settings, time.strftime("%Y-%m-%d %H:%M"), ratio)
    measured = {"defaults_s": compared.defaults_s, "settings_s": compared.settings_s} if compared is not None else {}
    recipe = {name: value for name, value in key.parts.items() if name != "recipe"}
    store.write(key.path(), tuned, {"measured": measured, "made_of": recipe})


def _conclude(outcome: Outcome, budget_s: float, key: store.Key, ranks: int) -> None:
    compared = outcome.comparison
    if compared is not None and compared.is_complete:
        click.echo(_compared(compared))
    elif outcome.is_decided:
        click.echo("Nothing was faster than the defaults: they are kept.")
    elif not outcome.arms and not outcome.ended_by:
        click.echo("There is nothing to search." + (" Several ranks have more to set: -np 2" if ranks == 1 else ""))
    elif not outcome.ended_by:
        click.echo(
            "Nothing but the defaults could be measured: nothing is stored."
            if compared is None
            else f"{space.text(compared.settings)} could not be compared with the defaults: nothing is stored."
        )
    if outcome.ended_by == "budget" and not outcome.is_decided:
        raise _too_short(outcome, budget_s)
    if outcome.ended_by == "budget":
        click.secho(f"The budget of {_minutes(budget_s)} did not suffice to try everything.", fg="yellow")
    elif outcome.ended_by == "interrupt":
        click.secho(
            f"Interrupted{'' if outcome.is_decided else ' before anything was confirmed: nothing is stored'}.", fg="yellow"
        )
    if outcome.settings:
        click.echo(f"Stored in {key.path()}; hvdtrain run with this recipe, its settings and these hosts uses it.")


def _too_short(outcome: Outcome, budget_s: float) -> JobError:
    assert outcome.forecast is not None
    ahead, tries = outcome.forecast, sum(len(arm.rounds_s) for arm in outcome.arms)
    return JobError(
        f"--budget {_budget(budget_s, up=False)} is too short, and nothing was found out or stored: {tries} "
        f"{'jobs' if tries > 1 else 'job'} took {outcome.spent_s:.0f} s, and what is left has no room for another one and for "
        f"the comparison of the best with the defaults after it ({_budget(ahead.least_s)} in all at least)",
        f"the same command with --budget {_budget(max(ahead.whole_s, 2 * budget_s))}",
    )


def _compared(compared: Comparison) -> str:
    defaults_s, settings_s = (
        bench_show.seconds(statistics.median(each)) for each in (compared.defaults_s, compared.settings_s)
    )
    figures = (
        f"{compared.ratio:.3f} of the defaults' step time ({settings_s} against {defaults_s}, medians of "
        f"{len(compared.defaults_s)} rounds in turns; fastest rounds: {compared.ratio_of_fastest:.3f}; noise: {compared.noise:.1%})"
    )
    verdict = "" if compared.is_gain else ". That is within the noise: the defaults are kept"
    return f"{space.text(compared.settings)}: {figures}{verdict}"


def _budget(value_s: float, *, up: bool = True) -> str:
    """As ``--budget`` takes it; ``up``: to a round number that is not below."""
    if not up:
        return f"{value_s:g}s" if value_s < 120 or value_s % 60 else f"{value_s / 60:g}m"
    for limit_s, step_s in ((120, 10), (600, 60), (3600, 300)):
        if value_s <= limit_s:
            return _budget(math.ceil(value_s / step_s) * step_s, up=False)
    return f"{math.ceil(value_s / 1800) / 2:g}h"


def _minutes(value_s: float) -> str:
    return f"{int(value_s) // 60}:{int(value_s) % 60:02d}"
