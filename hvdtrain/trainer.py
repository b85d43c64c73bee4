"""The training loop. It knows no framework, and no rank but its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from hvdtrain import consistency, metrics, window
from hvdtrain.adapters import NotFiniteError, Splittable
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.resume import changed
from hvdtrain.checkpoint.run import RunCheckpoints
from hvdtrain.comm import Communicator
from hvdtrain.config import Options
from hvdtrain.consistency import Tensors
from hvdtrain.data.feed import Feed, Limits, Wanted
from hvdtrain.data.loader import Batch
from hvdtrain.data.sources import as_source
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.handover import Handover, Held, Meeting, refuse_torn
from hvdtrain.loggers import Logger
from hvdtrain.metrics import Mean, Means
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.place import Place
from hvdtrain.progress import HERE
from hvdtrain.recipe import Recipe
from hvdtrain.rundir import RunDir
from hvdtrain.state import TrainState
from hvdtrain.stops import StoppedError, Stops
from hvdtrain.votes import Votes
from hvdtrain.window import Window


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
    #: how batches were loaded, and the part of the time in which ranks waited for them
    loading: str = ""
    data_wait: float = 0.0


class HostsChangedError(Exception):
    """All ranks stand after the same step, and are to meet again: hosts came or went."""


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
        tell: is called on the primary with a sentence on what was decided on the way.

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
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options, self.run_dir, self.comm = options or Options(), run_dir, comm
        self.adapter, self.callbacks = recipe.adapter, recipe.callbacks
        self.loggers: Sequence[Logger] = ()
        self.state = TrainState()
        HERE.enter("setting up")
        train, valid = as_source(recipe.train), None if recipe.valid is None else as_source(recipe.valid)
        self._placed: Callable[[Communicator], Place] = lambda comm: Place.of(recipe, train, valid, self.options, comm.world)
        self.place = self._placed(comm)
        if self.options.keep_best is not None and valid is None:
            raise UsageError("--keep-best needs validation data, and the recipe has none", "give it: Recipe(..., valid=...)")
        self._wanted = Wanted.parse(self.options.loader_workers, self.options.prefetch)
        self._announce, self._loading = tell, ""
        self._settings = settings or {}
        self.checkpoints = RunCheckpoints(
            run_dir.checkpoints if run_dir else None,
            self.adapter,
            comm,
            callbacks=self.callbacks,
            data=self.place.data,
            settings=self._settings,
            keep=self.options.keep,
            best=None if self.options.keep_best is None else Best.parse(self.options.keep_best),
        )
        self._stops = stops or Stops()
        self._votes = Votes(comm, self._stops, changes, lambda: self.checkpoints.failed)
        self._handover = Handover(self.callbacks)
        self._window = Window()
        #: who has which stage of the model; None where all have all of it
        self._mesh: Mesh | None = None
        self._values: Mapping[str, float] = {}  # of the last evaluation
        self._is_started = False
        #: how gradients travel between the ranks, and why so
        self.exchange = ""
        #: the step at which the job began, and the checkpoint that this rank resumed from then
        self.first_step = 0
        self.resumed: Checkpoint | None = None

    def move(self, comm: Communicator) -> None:
        """From now on the ranks of ``comm`` train; ``prepare`` and ``fit`` follow, as in a new trainer."""
        self.comm, self.place = comm, self._placed(comm)
        self.checkpoints.move(comm)

    @property
    def total_steps(self) -> int:
        """Steps at the end of the run, as it looks from here, if nothing stops it earlier."""
        return self.state.step if self._votes.over else self.place.total_steps(self.state)

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
        self._split()
        self.exchange = self.adapter.setup(self.comm, self.options.exchange_wanted)
        HERE.enter("comparing the ranks' set-up")
        self.place = self.place.meet(self.comm)
        if self._mesh is not None:
            self.place = self.place.on(self._mesh)
        meeting = Meeting()
        if self.comm.world.elastic:
            over, failed = self._votes.over, self.checkpoints.failed
            meeting = self._handover.meet(self.comm, self.state.step, over, failed=failed)
        tensors = self.adapter.tensors()
        if not meeting.is_first:  # an optimizer may make its state in its first step, which those who join have not done
            tensors = (pair for pair in tensors if not pair[0].startswith("optimizer/"))
        self._compare(consistency.check_shapes, tensors)
        if meeting.root is not None:
            self._follow(meeting.root, meeting.over)
        else:
            self._begin(meeting)
        self._handover.ready()
        HERE.enter("ready to train")
        self._votes.begin(self.comm, self.state.step)
        HERE.training = True
        return self.state

    def _split(self) -> None:
        """Collective. Split the model over ranks, if the options say so."""
        wanted = self.options.pipelining
        if isinstance(self.adapter, Splittable):
            HERE.enter("splitting the model")
            self._mesh, text = self.adapter.arrange(self.comm, wanted, self._sample)
            if self.comm.world.is_primary and text:
                self._announce(text)
        elif wanted.stages > 1:
            raise UsageError(
                f"--pipeline {wanted.stages} needs a model as a list of layers, and this is a {type(self.adapter).__name__}'s",
                "TorchPipeline([layer, layer, ...], lambda model: torch.optim.SGD(model.parameters(), lr), loss=...): docs/pipeline.md",
            ).everywhere()

    def _sample(self, mesh: Mesh) -> Any:
        """The first batch of this rank's replica."""
        with closing(self.place.on(mesh).loader.epoch(0)) as batches:
            return next(batches).data

    def _compare(self, check: Callable[..., None], tensors: Tensors) -> None:
        """Collective. ``check`` that the ranks that are to hold the same do."""
        if self._mesh is None or self._mesh.stages == 1 or not isinstance(self.adapter, Splittable):
            check(tensors, self.comm, self.place.hosts)
            return
        try:
            check(tensors, self.adapter.alike(), self.place.hosts, self._mesh.peers(self.comm.world.rank))
        except HvdtrainError as error:
            raise HvdtrainError(error.message, error.hint) from None  # the ranks of other stages do not know of it

    def _begin(self, meeting: Meeting) -> None:
        """Collective. No rank holds anything: resume, or start."""
        HERE.enter("looking for a checkpoint")
        self.resumed = self.checkpoints.resume(self.options.resume)
        if self.resumed is not None:
            self.state = self.resumed.state
            if self.options.resume == "auto":  # who names a checkpoint goes on from it
                self._votes.over = self.resumed.content.stopped
            self._values = self.resumed.content.valid if self._ended else {}
        elif meeting.torn:
            raise refuse_torn()
        else:
            HERE.enter("initial broadcast")
            self.adapter.sync()
        self._window.follow(())
        self.first_step = self.state.step

    def _follow(self, root: int, over: str) -> None:
        """Collective. Stand where ``root`` stands."""
        HERE.enter("taking over what the other ranks hold")
        mine = Held(self.state, self.first_step, self._window.names, self._values, self.checkpoints.best)
        held = self._handover.follow(self.comm, self.adapter, root, mine)
        self.state, self.first_step, self._values, self.checkpoints.best = held.state, held.first_step, held.values, held.best
        self._window.follow(held.window)
        self._votes.over = over

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
        self.place.close()
        return Summary(
            framework=self.adapter.framework,
            ranks=self.comm.world.size,
            nodes=self.comm.world.num_nodes,
            steps=self.state.step,
            epochs=self.state.epoch,
            samples=self.state.samples,
            samples_per_s=self._window.clock.samples_per_s,
            valid=self._values,
            stopped=self._votes.over,
            run_dir=str(self.run_dir.path) if self.run_dir else "",
            loading=self._loading,
            data_wait=self._window.data_wait,
        )

    def evaluate(self) -> Mapping[str, float]:
        """Collective. Means over every validation sample exactly once, the same on all ranks. Empty without data."""
        loader = self.place.validation
        if loader is None:
            return {}
        HERE.enter("evaluation")
        self.adapter.settle()
        total: Means = {}
        for batch in loader.epoch(0):
            total = metrics.merge(total, self.adapter.eval_step(batch.data))
            HERE.moved()
        values = metrics.values(window.reduce(total, self.comm, name="metrics/valid"), "valid/")
        values |= {f"valid/{name}": value for name, value in self.adapter.eval_end().items()}
        self._votes.add(callback.on_evaluate(self.state, values) for callback in self.callbacks)
        self._vote()
        self._values = values
        self._tell(values)  # when nothing can interrupt it any more: what is done again is told once
        return values

    def _train(self) -> None:
        """Collective. All steps that are left."""
        if self._handover.owes:
            self._after_step()
        if self._handover.must_save:
            self._save()
        with closing(self._batches()) as batches:
            for batch in batches:
                self._update(batch)
                self._after_step()
                if self._ended:
                    break
                HERE.enter("data loading")
                self._window.clock.mark()
        if not self._values:  # nothing was left to train
            self.evaluate()
        self._wait()

    def _after_step(self) -> None:
        """Collective, so whether something is done hangs on the step, the options and reduced numbers alone."""
        options = self.options
        evaluating, saving = self._due(options.eval_every), self._due(options.save_every)
        checking = options.check_every is not None and self._due(options.check_every)
        logging = self._ended or evaluating or saving or self._epoch_done or self.state.step % options.log_every == 0
        if logging or checking or self._votes.due(self.state.step):
            self._between_steps(logging=logging, evaluating=evaluating, saving=saving, checking=checking)
        self._handover.settled()
        if self._votes.changed and not self._ended:
            self._wait()  # by a rank that may be about to leave
            raise HostsChangedError

    def _between_steps(self, *, logging: bool, evaluating: bool, saving: bool, checking: bool) -> None:
        """Collective. What is due after a step, and what the ranks decide in it."""
        if logging and self._window.names:  # else the line was written before what was to follow was interrupted
            self._log()
        elif logging or self._votes.due(self.state.step):
            self._vote()
        if self._votes.failed:
            self._wait()  # which raises on all ranks what the one that wrote knows
        if self._ended or evaluating:
            saving = self.checkpoints.evaluated(self.state.step, self.evaluate()) or saving
        if self._votes.asked and not self._ended:
            self._stop()
        if self._ended or checking or (saving and self.options.check_every is None):
            self._check_values()
        if self._ended or saving:
            self._save()

    @property
    def _epoch_done(self) -> bool:
        return self.state.position == 0

    @property
    def _ended(self) -> bool:
        return bool(self._votes.over) or self.place.is_over(self.state)

    def _due(self, every: int | None) -> bool:
        return self._epoch_done if every is None else self.state.step % every == 0

    def _batches(self) -> Generator[Batch]:
        HERE.enter("data loading")
        self._window.clock.mark()
        loader = self.place.loader
        with closing(Feed(loader, self._wanted, Limits.of(loader.source, self.comm.world), self._loads)) as feed:
            while not self._ended:
                yield from feed.epoch(self.state.epoch, self.state.position)

    def _loads(self, how: str) -> None:
        self._loading = how
        if self.comm.world.is_primary:
            self._announce(f"loading: {how}")

    def _update(self, batch: Batch) -> None:
        """Collective. One optimizer update."""
        self._window.clock.loaded()
        HERE.enter("training step")
        step, part = self.state.step, batch.slice
        try:
            means = self.adapter.train_step(
                batch.data, lr=self.place.lr(step), weight=part.weight, seed=self.place.layers_seed(step)
            )
        except NotFiniteError as error:
            raise error.with_samples(str(part), self.comm) from None
        except Exception as error:
            error.add_note(str(part))
            raise
        self._window.add(means, part.global_count)
        self.state = self.place.advance(self.state, part.global_count)
        HERE.step = self.state.step
        self._votes.add(callback.on_step_end(self.state) for callback in self.callbacks)
        if self.comm.world.elastic:
            self._handover.stepped(self.checkpoints.best)

    def _log(self) -> None:
        """Collective. Reduce and log the window of steps; the same reduction carries the votes to stop."""
        HERE.enter("metrics reduction")
        step = self.state.step
        means = self._votes.take(self._window.reduce(self._votes.bring(step), self.comm), step)
        error = self._window.bad_loss(means.get("loss", Mean()), self.comm, self.place.hosts, step)
        values = metrics.values(means, "train/")
        if (rate := self.place.lr(step - 1)) is not None:
            values["train/lr"] = rate
        values |= self._window.close()
        self._tell(values)
        if error is not None:  # all ranks stop here, before it is saved
            raise error

    def _vote(self) -> None:
        """Collective."""
        step = self.state.step
        self._votes.take(window.reduce(self._votes.bring(step), self.comm, name="stop/votes"), step)

    def _stop(self) -> None:
        """Collective. Save, and end before the end."""
        self._save()
        self._wait()
        self._stops.met()
        saved = f"; the checkpoint of step {self.state.step} is saved" if self.run_dir else ""
        again = f"go on from there: the same command with --run-dir {self.run_dir.path}" if self.run_dir else ""
        raise StoppedError(f"stopped in order ({self._votes.asked}) at step {self.state.step}{saved}", again).everywhere()

    def _tell(self, values: Mapping[str, float]) -> None:
        if self.comm.world.is_primary:
            for logger in self.loggers:
                logger.log(self.state, values)

    def _check_values(self) -> None:
        """Collective."""
        if self.comm.world.size > 1:
            HERE.enter("comparing the ranks' weights")
            self.adapter.settle()
            self._compare(consistency.check_values, self.adapter.tensors())

    def _save(self) -> None:
        """Collective."""
        if self.run_dir is not None:
            HERE.enter("saving a checkpoint")
            self.adapter.settle(saving=True)
            self.checkpoints.save(self.state, stopped=self._votes.over)
            self._handover.saving(mine=self.comm.world.is_primary)

    def _wait(self) -> None:
        """Collective."""
        HERE.enter("waiting for the last checkpoint")
        self.checkpoints.wait()
        self._handover.saved()
