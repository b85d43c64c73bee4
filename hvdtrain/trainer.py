"""The training loop. It knows no framework, and no rank but its own."""

from __future__ import annotations

import hashlib
import math
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain import consistency, lr, metrics
from hvdtrain.adapters import NotFiniteError
from hvdtrain.callbacks import Callback
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.resume import changed
from hvdtrain.checkpoint.run import BestSoFar, RunCheckpoints
from hvdtrain.clock import Clock
from hvdtrain.comm import Communicator
from hvdtrain.config import Options
from hvdtrain.data.loader import Batch, Loader
from hvdtrain.data.sampler import Sampler, Share, Slice
from hvdtrain.data.shares import host_shares
from hvdtrain.data.sources import Source, as_source
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.loggers import Logger
from hvdtrain.metrics import Mean, Means
from hvdtrain.progress import HERE
from hvdtrain.recipe import Recipe
from hvdtrain.rundir import RunDir
from hvdtrain.state import TrainState
from hvdtrain.stops import StoppedError, Stops
from hvdtrain.votes import NAMES as VOTES
from hvdtrain.votes import Votes


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    framework: str
    ranks: int
    nodes: int
    steps: int
    epochs: int
    samples: int
    #: over loading and updating, without the first step (which traces and connects), evaluations and checkpoints
    samples_per_s: float
    valid: Mapping[str, float]
    stopped: str
    run_dir: str


class HostsChangedError(Exception):
    """All ranks stand after the same step, and are to meet again: hosts came or went."""


@dataclass(frozen=True)
class Held:
    """What a rank that goes on gives to those that join or fell behind, beside the adapter's state."""

    state: TrainState
    #: whether what is due after the last step (a log line, an evaluation, a checkpoint) is still to be done
    owes: bool
    window: tuple[str, ...]
    values: Mapping[str, float]
    over: str
    callbacks: tuple[dict[str, Any], ...]
    best: BestSoFar


class Trainer:
    """Trains one recipe on the ranks of ``comm``. Every rank makes one and calls ``prepare``, then ``fit``.

    In an elastic job, what a lost rank or ``HostsChangedError`` ends goes on with ``move``, ``prepare`` and ``fit``.

    Args:
        recipe: what to train; options override its batch size, epochs and seed.
        comm: connects the ranks.
        options: how often to log, evaluate and save; where to resume.
        run_dir: where checkpoints go; None saves none.
        stops: whether this rank was asked to end before the end.
        settings: the recipe's parameters, which checkpoints name when they do not fit.
        changes: whether this rank knows of hosts that came or went.

    Raises:
        UsageError: the data is none that can be trained on, or there is none.
    """

    def __init__(
        self,
        recipe: Recipe,
        comm: Communicator,
        *,
        options: Options | None = None,
        run_dir: RunDir | None = None,
        stops: Stops | None = None,
        settings: Mapping[str, Any] | None = None,
        changes: Callable[[], bool] = lambda: False,
    ) -> None:
        self.options = options or Options()
        self._given, self._source = recipe, as_source(recipe.train)
        self.run_dir = run_dir
        self.loggers: Sequence[Logger] = ()
        self.adapter = recipe.adapter
        self.callbacks: tuple[Callback, ...] = recipe.callbacks
        self.state = TrainState()
        HERE.enter("setting up")
        #: the recipe's own batch size, which its learning rate is for
        self.base_batch_size = recipe.batch_size
        self._place(comm)
        #: host of each rank
        self.hosts: tuple[str, ...] = ()
        self.valid: Source | None = None if recipe.valid is None else as_source(recipe.valid)
        self._values: Mapping[str, float] = {}
        self._stops = stops or Stops()
        self._votes = Votes(comm, self._stops, changes)
        self._is_ready = self._is_started = False
        self._owes = False  # see ``Held``; how the callbacks and the best step stood before that
        self._before: tuple[tuple[dict[str, Any], ...], BestSoFar] = (), (None, (-1, {}))
        self._window: Means = {}  # of the steps since the last log line
        self._clock = Clock()
        #: the checkpoint that this run goes on from
        self.resumed: Checkpoint | None = None
        if self.options.keep_best is not None and self.valid is None:
            raise UsageError("--keep-best needs validation data, and the recipe has none", "give it: Recipe(..., valid=...)")
        self._settings = settings or {}
        self.checkpoints = self._checkpoints()

    def move(self, comm: Communicator) -> None:
        """From now on the ranks of ``comm`` train; ``prepare`` and ``fit`` follow, as in a new trainer."""
        self.checkpoints.close()
        best = self.checkpoints.best
        self._place(comm)
        self.checkpoints = self._checkpoints()
        self.checkpoints.best = best

    def _place(self, comm: Communicator) -> None:
        """What hangs on this rank's place among how many."""
        self.comm = comm
        self.recipe = _with_options(self._given, self.options, comm.world.size)
        #: factor on the recipe's learning rate, by the rule of --lr-scale
        self.lr_factor = lr.scale(self.options.lr_scale, self.recipe.batch_size, self.base_batch_size)
        self.lr = _schedule(self.recipe, self.options.lr_scale, self.lr_factor)
        self.sampler = Sampler(len(self._source), self.recipe.batch_size, self.recipe.seed, self.recipe.shuffle)
        self.loader = Loader(self._source, self.sampler, Share.equal(comm.world.rank, comm.world.size))

    def _checkpoints(self) -> RunCheckpoints:
        return RunCheckpoints(
            self.run_dir.checkpoints if self.run_dir else None,
            self.adapter,
            self.comm,
            callbacks=self.callbacks,
            data=self._data(),
            settings=self._settings,
            keep=self.options.keep,
            best=None if self.options.keep_best is None else Best.parse(self.options.keep_best),
        )

    @property
    def total_steps(self) -> int:
        """Steps at the end of the run, as it looks from here, if nothing stops it earlier."""
        left = 0
        if self.state.epoch < self.recipe.epochs and not self._votes.over:
            this_epoch = -(-(self.sampler.num_samples - self.state.position) // self.sampler.batch_size)
            left = this_epoch + (self.recipe.epochs - self.state.epoch - 1) * self.sampler.steps_per_epoch
        return max(self.state.step, min(self.state.step + left, self._max_steps))

    @property
    def changed(self) -> str:
        """The recipe's parameters that are others than in the checkpoint that this run goes on from."""
        return "" if self.resumed is None else changed(self.resumed.content.settings, self._settings)

    def prepare(self) -> TrainState:
        """Collective. Go on from the rank that is furthest, if any has trained already; else resume where the options say, or else
        make all ranks start from the primary's weights.

        Raises:
            HvdtrainError: Horovod is missing, the ranks disagree about the run, or there is nothing to resume that fits.
        """
        self.adapter.setup(self.comm)
        self._check_agreement()
        self.hosts = tuple(self.comm.allgather(socket.gethostname(), name="setup/hosts"))
        if self.options.share is not None:
            weights = host_shares(self.options.share, self.hosts, lenient=self.comm.world.elastic)
            self.loader = replace(self.loader, share=Share.weighted(self.comm.world.rank, weights))
        furthest = self._furthest() if self.comm.world.elastic else None
        tensors = self.adapter.tensors()
        if furthest is not None:  # an optimizer may make its state in its first step, which those who join have not done
            tensors = (pair for pair in tensors if not pair[0].startswith("optimizer/"))
        consistency.check_shapes(tensors, self.comm, self.hosts)
        HERE.enter("looking for a checkpoint")
        if furthest is not None:
            self._follow(furthest)
        elif (found := self.checkpoints.resume(self.options.resume)) is not None:
            self.state, self.resumed = found.state, found
            if self.options.resume == "auto":  # who names a checkpoint goes on from it
                self._votes.over = found.content.stopped
        else:
            HERE.enter("initial broadcast")
            self.adapter.sync()
        HERE.enter("ready to train")
        self._votes.begin(self.comm, self.state.step)
        HERE.training = True
        self._is_ready = True
        return self.state

    def _furthest(self) -> int | None:
        """Collective. The first of the ranks whose last step is the latest, if any has been trained on."""
        steps = self.comm.allgather(self.state.step if self._is_ready else -1, name="setup/steps")
        return None if max(steps) < 0 else steps.index(max(steps))

    def _follow(self, root: int) -> None:
        """Collective. Stand where ``root`` stands. A lost rank may have let some do a step that others could not finish."""
        HERE.enter("taking over what the other ranks hold")
        self.adapter.settle()  # what the others have gathered since the last time is not lost
        self.adapter.sync(root)
        held: Held = self.comm.broadcast(self._held() if self.comm.world.rank == root else None, name="setup/held", root=root)
        if held.owes or held.state != self.state:
            for callback, state in zip(self.callbacks, held.callbacks, strict=True):
                if state:
                    callback.load_state_dict(dict(state))
        self.state, self._owes, self._values, self._votes.over = held.state, held.owes, held.values, held.over
        self._window = {name: self._window.get(name, Mean()) for name in held.window}
        self.checkpoints.best = held.best
        self._before = held.callbacks, held.best

    def _held(self) -> Held:
        callbacks, best = self._before if self._owes else self._now()
        return Held(self.state, self._owes, tuple(self._window), self._values, self._votes.over, callbacks, best)

    def _now(self) -> tuple[tuple[dict[str, Any], ...], BestSoFar]:
        return tuple(callback.state_dict() for callback in self.callbacks), self.checkpoints.best

    def fit(self, loggers: Sequence[Logger] = ()) -> Summary:
        """Collective. Train to the end, or until a rank's callback asks to stop.

        ``loggers`` are called on the primary only, with figures that are reduced over all ranks.
        """
        self.loggers = loggers
        for callback in () if self._is_started else self.callbacks:
            callback.on_start(self.state)
        self._is_started = True
        with closing(self.checkpoints):
            self._train()
        for callback in self.callbacks:
            callback.on_end(self.state)
        HERE.enter("finishing")
        return Summary(
            framework=self.adapter.framework,
            ranks=self.comm.world.size,
            nodes=self.comm.world.num_nodes,
            steps=self.state.step,
            epochs=self.state.epoch,
            samples=self.state.samples,
            samples_per_s=self._clock.samples_per_s,
            valid=self._values,
            stopped=self._votes.over,
            run_dir=str(self.run_dir.path) if self.run_dir else "",
        )

    def evaluate(self) -> Mapping[str, float]:
        """Collective. Means over every validation sample exactly once, the same on all ranks. Empty without data."""
        if self.valid is None:
            return {}
        HERE.enter("evaluation")
        self.adapter.settle()
        sampler = Sampler(len(self.valid), self.recipe.batch_size, shuffle=False)
        total: Means = {}
        for batch in Loader(self.valid, sampler, self.loader.share).epoch(0):
            total = metrics.merge(total, self.adapter.eval_step(batch.data))
            HERE.moved()
        self._values = metrics.values(self._reduce(total, "metrics/valid"), "valid/")
        self._values |= {f"valid/{name}": value for name, value in self.adapter.eval_end().items()}
        self._tell(self._values)
        self._votes.add(callback.on_evaluate(self.state, self._values) for callback in self.callbacks)
        self._vote()
        return self._values

    def _train(self) -> None:
        """Collective. All steps that are left."""
        if self._owes:
            self._after_step()
        with closing(self._batches()) as batches:
            for batch in batches:
                self._update(batch)
                self._after_step()
                if self._ended:
                    break
                HERE.enter("data loading")
                self._clock.mark()
        if not self._values:  # nothing was left to train
            self._values = (self.resumed and self.resumed.content.valid) or self.evaluate()
        HERE.enter("waiting for the last checkpoint")
        self.checkpoints.wait()
        self._owes = False

    def _after_step(self) -> None:
        """Collective, so whether something is done hangs on the step, the options and reduced numbers alone."""
        evaluating, saving = self._due(self.options.eval_every), self._due(self.options.save_every)
        logging = self._ended or evaluating or saving or self._epoch_done or self.state.step % self.options.log_every == 0
        if logging and self._window:  # else the line was written before what was to follow was interrupted
            self._log()
        elif logging or self._votes.due(self.state.step):
            self._vote()
        if self._votes.asked and not self._ended:
            self._stop()
        if self._ended or evaluating:
            saving = self._evaluate_best() or saving
        if self._ended or (saving if self.options.check_every is None else self._due(self.options.check_every)):
            self._check_values()
        if self._ended or saving:
            self._save()
        self._owes = self._ended  # the last checkpoint is still being written, by a rank that may be lost
        if self._votes.changed and not self._ended:
            raise HostsChangedError

    def _evaluate_best(self) -> bool:
        """Collective. Evaluate; whether this is the best step so far, which is to be saved."""
        values = self.evaluate()
        return self.checkpoints.evaluated(self.state.step, values)

    @property
    def _max_steps(self) -> int:
        return self.options.max_steps or sys.maxsize

    @property
    def _epoch_done(self) -> bool:
        return self.state.position == 0

    @property
    def _ended(self) -> bool:
        return bool(self._votes.over) or self.state.step >= self._max_steps or self.state.epoch >= self.recipe.epochs

    def _due(self, every: int | None) -> bool:
        return self._epoch_done if every is None else self.state.step % every == 0

    def _batches(self) -> Generator[Batch]:
        HERE.enter("data loading")
        self._clock.mark()
        while not self._ended:
            yield from self.loader.epoch(self.state.epoch, self.state.position)

    def _update(self, batch: Batch) -> None:
        """Collective. One optimizer update."""
        HERE.enter("training step")
        rate = None if self.lr is None else float(self.lr(self.state.step))  # NumPy's numbers do not belong in checkpoints
        seed = step_seed(self.recipe.seed, self.state.step, self.comm.world.rank)
        try:
            means = self.adapter.train_step(batch.data, lr=rate, weight=batch.slice.weight, seed=seed)
        except NotFiniteError as error:
            raise self._with_samples(error, batch.slice).everywhere() from None
        except Exception as error:
            error.add_note(str(batch.slice))
            raise
        self._window = metrics.merge(self._window, means)
        self._clock.lap(batch.slice.global_count)
        self.state = self.state.after(batch.slice.global_count)
        if self.state.position >= self.sampler.num_samples:
            self.state = self.state.next_epoch()
        HERE.step = self.state.step
        self._votes.add(callback.on_step_end(self.state) for callback in self.callbacks)
        if self.comm.world.elastic:
            self._owes, self._before = True, self._now()
        if self.checkpoints.failed:
            self._votes.add(["a checkpoint could not be written"])  # saving raises it on all ranks

    def _with_samples(self, error: NotFiniteError, mine: Slice) -> HvdtrainError:
        """Collective. The error with the samples that the rank to blame had in this step."""
        everyone = self.comm.allgather(str(mine), name="samples of the step")
        whose = (
            f"in its {everyone[error.rank]}"
            if error.rank is not None
            else f"in the global batch that begins with {everyone[0]}"
        )
        return HvdtrainError(f"{error.message}, {whose}", error.hint)

    def _log(self) -> None:
        """Collective. Reduce and log the window of steps; the same reduction carries the votes to stop."""
        HERE.enter("metrics reduction")
        window = self._window
        means = self._reduce({**window, **self._votes.bring(self.state.step)}, "metrics/train")
        self._window = {}
        self._clock.lap()  # reading the figures waits for the device, which may be many steps behind
        votes = {name: means.pop(name) for name in VOTES}
        values = metrics.values(means, "train/")
        if self.lr is not None:
            values["train/lr"] = float(self.lr(self.state.step - 1))
        values["speed/samples_per_s"] = self._clock.end_window()
        self._tell(values)
        loss = means.get("loss", Mean())
        if loss.count and not math.isfinite(loss.value):  # a reduced number: all ranks stop here, before it is saved
            mine = window.get("loss", Mean())
            bad = self.comm.allgather(bool(mine.count) and not math.isfinite(mine.value), name="loss/blame")
            of = ", ".join(f"rank {rank} ({self.hosts[rank]})" for rank, is_bad in enumerate(bad) if is_bad)
            raise HvdtrainError(
                f"the training loss of {of or 'all ranks together'} is {values['train/loss']} in the steps up to {self.state.step}",
                "lower the learning rate or check the data; --resume auto goes on from the last checkpoint, which is older",
            ).everywhere()
        self._votes.take(votes, self.state.step)

    def _vote(self) -> None:
        """Collective."""
        self._votes.take(self._reduce(self._votes.bring(self.state.step), "stop/votes"), self.state.step)

    def _stop(self) -> None:
        """Collective. Save, and end before the end."""
        self._save()
        self.checkpoints.wait()
        self._stops.met()
        saved = f"; the checkpoint of step {self.state.step} is saved" if self.run_dir else ""
        again = f"go on from there: the same command with --run-dir {self.run_dir.path}" if self.run_dir else ""
        raise StoppedError(f"stopped in order ({self._votes.asked}) at step {self.state.step}{saved}", again).everywhere()

    def _reduce(self, means: Means, name: str) -> Means:
        return metrics.reduce(means, lambda numbers: self.comm.allreduce(numbers, name=name).tolist())

    def _tell(self, values: Mapping[str, float]) -> None:
        if self.comm.world.is_primary:
            for logger in self.loggers:
                logger.log(self.state, values)

    def _check_values(self) -> None:
        """Collective."""
        if self.comm.world.size > 1:
            HERE.enter("comparing the ranks' weights")
            self.adapter.settle()
            consistency.check_values(self.adapter.tensors(), self.comm, self.hosts)

    def _save(self) -> None:
        """Collective."""
        if self.run_dir is not None:
            HERE.enter("saving a checkpoint")
            self.adapter.settle()
            self.checkpoints.save(self.state, stopped=self._votes.over)

    def _data(self) -> dict[str, Any]:
        """What the meaning of an epoch and a position hangs on."""
        return {"samples": self.sampler.num_samples, "seed": self.sampler.seed, "shuffle": self.sampler.shuffle}

    def _check_agreement(self) -> None:
        """Collective. Refuse to train ranks that disagree about the run: they would see other samples, or hang."""
        HERE.enter("comparing the ranks' set-up")
        mine = {
            **self._data(),
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "first lr": None if self.lr is None else self.lr(0),
            "valid samples": 0 if self.valid is None else len(self.valid),
            "options": repr(replace(self.options, run_dir=None)),
        }
        everyone = self.comm.allgather(mine, name="setup/agreement")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise HvdtrainError(
                    f"rank {rank} is set up otherwise than rank 0: {_different(theirs, everyone[0])}",
                    "all hosts must have the same recipe, data, options and HVDTRAIN_* variables",
                ).everywhere()


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of the random layers of one step on one rank: 63 bits, another for each step and rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8, person=b"hvdtrain-layers").digest()
    return int.from_bytes(digest, "little") >> 1


def _schedule(recipe: Recipe, rule: str, factor: float) -> lr.Schedule | None:
    if recipe.lr is None:
        if rule != "none":
            raise UsageError(
                f"--lr-scale {rule} scales the recipe's lr, and the recipe gives none",
                "give it: Recipe(..., lr=0.1) or lr=hvdtrain.lr.warmup(...)",
            )
        return None
    schedule = lr.constant(recipe.lr) if isinstance(recipe.lr, (int, float)) else recipe.lr
    return schedule if factor == 1.0 else lr.scaled(schedule, factor)


def _with_options(recipe: Recipe, options: Options, ranks: int) -> Recipe:
    changes = {name: value for name in ("batch_size", "epochs", "seed") if (value := getattr(options, name)) is not None}
    if options.batch_size_per_rank is not None:
        changes["batch_size"] = options.batch_size_per_rank * ranks
    return replace(recipe, **changes)


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return ", ".join(f"{name} {first.get(name)} instead of {second.get(name)}" for name in names)
