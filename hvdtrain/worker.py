"""A rank's whole life: find the world, build the recipe, connect, train."""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

from hvdtrain import recipe as recipes
from hvdtrain import run_json, rundir, startup
from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.comm import agree
from hvdtrain.comm.driver import HostChanges
from hvdtrain.config import Config
from hvdtrain.devices import pin_device
from hvdtrain.elastic import Change, rounds
from hvdtrain.errors import UsageError
from hvdtrain.horovod import start
from hvdtrain.loggers import Logger
from hvdtrain.loggers.console import ConsoleLogger, say, say_aside
from hvdtrain.loggers.jsonl import JsonLinesLogger
from hvdtrain.loggers.together import Together
from hvdtrain.progress import HERE
from hvdtrain.rank import Rank, guard, watched
from hvdtrain.recipe import RecipeFunction
from hvdtrain.rundir import RunDir, write_json
from hvdtrain.startup import Startup
from hvdtrain.stops import STARTED, Stops
from hvdtrain.trainer import Summary, Trainer
from hvdtrain.world import World

log = logging.getLogger(__name__)

#: How long the primary of a new round waits for the last one's hold on the run directory.
_HANDED_OVER_S = 5.0


def train(config: Config, function: RecipeFunction | None = None) -> int:
    """Collective. Train as ``config`` says, as one rank of the job that the environment tells of; the exit code.

    ``function`` is the recipe function where it is at hand; else ``config.recipe`` names it.
    """
    return guard(lambda rank: _train(rank, config, function))


def _train(rank: Rank, config: Config, function: RecipeFunction | None) -> None:
    options = config.options
    if options.run_dir:
        rank.run_dir = RunDir(Path(options.run_dir))
    rank.world = World.from_env()
    if rank.world.is_primary:
        before = startup.before_now(os.environ.get(startup.LAUNCH, ""), now=time.time(), age_s=startup.process_age_s())
        HERE.observer = startup.Recorder(functools.partial(_begun, rank), before).entered
    stops = Stops(options.max_time, since=float(os.environ.get(STARTED, 0)) or None)
    # Alone it keeps nobody waiting, and may be in a debugger.
    ends = options.stall_action == "end" and (rank.world.size > 1 or rank.world.elastic)
    start.limit_stalls(options.stall_timeout, os.environ, ends=ends)
    with watched(rank, options.stall_timeout, ends=ends), stops.listening():
        _run(rank, config, function, stops)


def _run(rank: Rank, config: Config, function: RecipeFunction | None, stops: Stops) -> None:
    pin_device(rank.world, os.environ)
    HERE.enter("importing the recipe")
    function = function or recipes.load(config.recipe)
    HERE.enter("building the recipe")
    recipe = recipes.build(function, config.settings)
    settings = recipes.arguments(function, config.settings)
    hosts = HostChanges()
    trainer: Trainer | None = None

    def train_round(change: Change | None) -> None:
        nonlocal trainer
        comm = rank.comm
        assert comm is not None
        rank.run_dir = RunDir(agree(comm, lambda: _claim_run_dir(rank, config, again=change is not None), name="run directory"))
        rank.is_claimed = True
        HERE.enter("setting up")
        if trainer is None:
            trainer = Trainer(
                recipe, comm, options=config.options, run_dir=rank.run_dir, stops=stops, settings=settings,
                changes=lambda: hosts.noticed, tell=say_aside,
            )  # fmt: skip
        else:
            trainer.move(comm)
        trainer.prepare()
        _fit(rank, config, trainer, function, change, stops)

    HERE.enter("connecting the ranks")
    rounds(rank, recipe.adapter.framework, hosts, train_round)


def _begun(rank: Rank, start: Startup) -> None:
    """The first step is done."""
    rank.startup = start.phases
    say(start.text(), dim=True)


def _fit(rank: Rank, config: Config, trainer: Trainer, function: RecipeFunction, change: Change | None, stops: Stops) -> None:
    """Collective. Train, and tell of it."""
    assert rank.run_dir is not None
    loggers: list[Logger] = []
    if rank.world.is_primary:
        if change is None:
            run_json.write(rank.run_dir, config, trainer, function)
            _greet(trainer, rank.run_dir)
        else:
            say(change.text(rank.world.size, trainer.state.step))
        loggers = _loggers(trainer, rank.run_dir)
        if not rank.world.elastic:  # where this rank may be lost and the others go on, whose figures were these
            loggers = [Together(loggers)]
    try:
        summary = trainer.fit(loggers)
        stops.met()  # what was asked for too late is as good as done
    finally:
        for logger in loggers:
            logger.close()
    if rank.world.is_primary:
        write_json(rank.run_dir.summary_json, asdict(summary) | {"startup": rank.startup})
        say(_closing(summary, trainer.first_step, trainer.resumed))


def _claim_run_dir(rank: Rank, config: Config, *, again: bool) -> Path:
    """``again``: this job holds it already, through a rank that may just be ending."""
    path = rank.run_dir.path if rank.run_dir is not None else rundir.create(config.recipe)
    ends_at = time.monotonic() + (_HANDED_OVER_S if again else 0.0)
    while rank.lock is None:
        try:
            rank.lock = RunDir(path).claim()
        except UsageError:
            if not again:
                raise
            if time.monotonic() > ends_at:
                log.warning("a rank that is gone still holds %s; another job could write there now", path)
                break
            time.sleep(0.1)
    return path


def _loggers(trainer: Trainer, run_dir: RunDir) -> list[Logger]:
    loggers: list[Logger] = [
        ConsoleLogger(trainer.total_steps, trainer.place.recipe.epochs, trainer.state.step, live=trainer.comm.world.size == 1),
        JsonLinesLogger(run_dir.metrics_jsonl, trainer.state.step),
    ]
    try:
        from hvdtrain.loggers.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(run_dir.tensorboard))
    except ImportError:
        log.info("no TensorBoard curves: pip install 'hvdtrain[tensorboard]'")
    return loggers


def _greet(trainer: Trainer, run_dir: RunDir) -> None:
    world, state, place = trainer.comm.world, trainer.state, trainer.place
    ranks = (
        f"{world.size} ranks on {world.num_nodes} host{'s' if world.num_nodes > 1 else ''}" if world.size > 1 else "1 process"
    )
    epochs = f"{place.recipe.epochs} epoch{'s' if place.recipe.epochs > 1 else ''}"
    say(
        f"{trainer.adapter.framework} on {ranks}: {place.sampler.num_samples:,} samples, "
        f"global batch {place.sampler.batch_size}, {epochs}, {trainer.total_steps} steps; files in {run_dir.path}"
    )
    if trainer.exchange:
        say(f"exchange of gradients: {trainer.exchange}")
    if trainer.options.lr_scale != "none":
        say(
            f"learning rate: the recipe's times {place.lr_factor:.4g} ({trainer.options.lr_scale} rule, "
            f"batches of {place.recipe.batch_size} instead of {place.base_batch_size})"
        )
    if state.step and state.step < trainer.total_steps:
        say(f"resuming at step {state.step}, epoch {state.epoch + 1}, after {state.position:,} samples of it")
    if trainer.changed:
        say(f"settings that changed since that checkpoint: {trainer.changed}")


def _closing(summary: Summary, first_step: int, resumed: Checkpoint | None) -> str:
    if summary.steps == first_step and summary.stopped and resumed is not None:
        return (
            f"nothing left to train: the run was stopped early at step {summary.steps}: {summary.stopped} "
            f"(train on: --resume {resumed.path})"
        )
    if summary.steps == first_step:
        done = f"nothing left to train at step {summary.steps} (more: raise --epochs, or use another --run-dir)"
    else:
        done = f"done: {summary.steps - first_step} steps at {summary.samples_per_s:,.0f} samples/s"
    figures = "".join(f", {name} {value:.4g}" for name, value in summary.valid.items())
    return f"{done}{figures}" + (f"; stopped early: {summary.stopped}" if summary.stopped else "")
