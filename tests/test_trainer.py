"""The loop: what it trains, when it evaluates, saves and stops. With the NumPy adapter, on one process."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hvdtrain
from hvdtrain import lr
from hvdtrain.adapters import NotFiniteError
from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.config import Options
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.handover import Held, Standing
from hvdtrain.metrics import Mean
from hvdtrain.rundir import RunDir
from hvdtrain.state import TrainState
from hvdtrain.stops import StoppedError, Stops
from hvdtrain.trainer import HostsChangedError, Trainer
from hvdtrain.world import World
from tests.support import recipes

STEPS_PER_EPOCH = 16  # 1,003 samples, batches of 64


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, state: TrainState, values) -> None:
        self.lines.append((state.step, dict(values)))

    def close(self) -> None:
        pass

    def steps(self, name: str) -> list[int]:
        return [step for step, values in self.lines if name in values]


def fit(recipe: hvdtrain.Recipe | None = None, run_dir: Path | None = None, **options):
    lines = Lines()
    trainer = Trainer(
        recipe or recipes.linear(),
        LocalCommunicator(World()),
        options=Options(**options),
        run_dir=RunDir(run_dir) if run_dir else None,
    )
    trainer.prepare()
    return trainer.fit([lines]), trainer, lines


def test_it_trains_every_epoch_to_its_end_and_reports_what_was_done():
    summary, trainer, _ = fit()
    assert (summary.steps, summary.epochs, summary.samples) == (2 * STEPS_PER_EPOCH, 2, 2 * 1003)
    assert summary.valid["valid/accuracy"] > 0.6
    assert summary.samples_per_s > 0
    assert trainer.total_steps == 32


@pytest.mark.parametrize(("options", "steps"), [({"max_steps": 5}, 5), ({"epochs": 3}, 48), ({"batch_size": 1003}, 2)])
def test_options_override_the_recipe(options, steps):
    assert fit(**options)[0].steps == steps


def test_figures_are_logged_every_so_many_steps_and_at_the_end_of_each_epoch():
    _, _, lines = fit(log_every=7)
    assert lines.steps("train/loss") == [7, 14, 16, 21, 28, 32]
    assert lines.steps("valid/loss") == [16, 32]


def test_evaluation_and_checkpoints_come_when_they_are_due(tmp_path):
    _, _, lines = fit(run_dir=tmp_path, eval_every=10, save_every=12, keep=9)
    assert lines.steps("valid/loss") == [10, 20, 30, 32]
    assert [path.name[-2:] for path in sorted((tmp_path / "checkpoints").iterdir())] == ["12", "24", "32"]


def test_what_ranks_hold_by_themselves_is_gathered_for_a_checkpoint_alone(tmp_path):
    recipe, gathered = recipes.linear(), []
    recipe.adapter.settle = lambda *, saving=False: gathered.append(saving)  # type: ignore[method-assign]
    fit(recipe, run_dir=tmp_path, max_steps=12, eval_every=3, save_every=6)
    assert gathered == [False, False, True, False, False, True]


def test_the_speed_counts_the_wait_for_figures_and_leaves_evaluations_out():
    class Late:
        """A figure that its device has not finished yet, as a tensor on a GPU is."""

        def __add__(self, other: object) -> Late:
            return self

        __radd__ = __add__

        def __float__(self) -> float:
            time.sleep(0.1)
            return 1.0

    class SlowToEvaluate(LinearAdapter):
        late = False

        def train_step(self, batch, *, lr, weight, seed=None):
            means = super().train_step(batch, lr=lr, weight=weight)
            return {"loss": hvdtrain.Mean(Late(), len(batch[1]))} if self.late else means

        def eval_step(self, batch):
            time.sleep(0.25)
            return super().eval_step(batch)

    adapter = SlowToEvaluate(recipes.FEATURES, recipes.CLASSES)
    summary, _, lines = fit(replace(recipes.linear(), adapter=adapter), log_every=8)
    speeds = [values["speed/samples_per_s"] for _, values in lines.lines if "train/loss" in values]
    assert min(*speeds, summary.samples_per_s) > 8 * 64 / 0.25
    adapter.late = True
    summary, _, lines = fit(replace(recipes.linear(), adapter=adapter), log_every=8)
    speeds = [values["speed/samples_per_s"] for _, values in lines.lines if "train/loss" in values]
    assert max(*speeds, summary.samples_per_s) < 8 * 64 / 0.1


def test_evaluation_counts_every_sample_once():
    recipe = recipes.linear()
    _, trainer, _ = fit(recipe, max_steps=3)
    inputs, targets = recipe.valid
    whole = trainer.adapter.eval_step((inputs, targets))
    assert trainer.evaluate()["valid/loss"] == pytest.approx(whole["loss"].value, rel=1e-12)


def test_the_logged_training_loss_is_the_mean_over_the_samples_of_the_window():
    recipe = recipes.linear()
    _, _, lines = fit(recipe, log_every=16, max_steps=16)
    other = recipes.linear()
    check = Trainer(other, LocalCommunicator(World()))
    check.prepare()
    total = count = 0.0
    for batch in check.place.loader.epoch(0):
        mean = other.adapter.train_step(batch.data, lr=None, weight=1.0)["loss"]
        total, count = total + mean.total, count + mean.count
    assert count == 1003
    assert lines.lines[0][1]["train/loss"] == pytest.approx(total / count)


def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    whole = fit()[1].adapter.weights
    for stop in (5, 16, 21, None):  # in an epoch, at its end, in the next, to the end
        _, trainer, _ = fit(run_dir=tmp_path, max_steps=stop)
    assert np.array_equal(trainer.adapter.weights, whole)


def test_a_resumed_run_loads_no_sample_twice(tmp_path):
    seen: list[int] = []
    for stop in (3, 7, 16):
        recipe = recipes.linear()
        fit(recipe, run_dir=tmp_path, max_steps=stop)
        seen += [index for part in recipe.train.taken for index in part][: 64 * 100]
    first_epoch = list(dict.fromkeys(seen))
    assert sorted(first_epoch) == list(range(1003))


def test_a_finished_run_that_is_started_again_trains_nothing_and_loses_nothing(tmp_path):
    first = fit(run_dir=tmp_path)[0]
    again = fit(run_dir=tmp_path)[0]
    assert (again.steps, again.valid) == (first.steps, first.valid)
    assert fit(run_dir=tmp_path, epochs=3)[0].steps == 48


def test_resuming_beyond_the_last_step_asked_for_trains_nothing(tmp_path):
    fit(run_dir=tmp_path, max_steps=9)
    summary, trainer, _ = fit(run_dir=tmp_path, max_steps=5)
    assert (summary.steps, trainer.total_steps) == (9, 9)


def test_resuming_an_older_checkpoint_beside_newer_ones_is_refused(tmp_path):
    fit(run_dir=tmp_path / "a", max_steps=9, save_every=3)
    older = str(tmp_path / "a/checkpoints/step-00000003")
    with pytest.raises(UsageError, match="holds step-00000009, which is newer than the checkpoint to resume"):
        fit(run_dir=tmp_path / "a", resume=older)
    assert fit(run_dir=tmp_path / "b", resume=older, max_steps=5)[0].steps == 5


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    fit(run_dir=tmp_path, max_steps=3)
    with pytest.raises(UsageError, match="seed 5 instead of 6"):
        fit(run_dir=tmp_path, seed=6)
    with pytest.raises(UsageError, match="samples 1003 instead of 900"):
        fit(recipes.linear(samples=900), run_dir=tmp_path)


def test_starting_anew_in_a_directory_with_checkpoints_is_refused(tmp_path):
    fit(run_dir=tmp_path, max_steps=3)
    with pytest.raises(UsageError, match="holds the checkpoints of an earlier run"):
        fit(run_dir=tmp_path, resume="never")


def test_a_callback_stops_the_run_and_its_reason_is_reported():
    class AtNine(hvdtrain.Callback):
        def on_step_end(self, state: TrainState) -> str | None:
            return "nine steps are enough" if state.step == 9 else None

    summary = fit(replace(recipes.linear(), callbacks=(AtNine(),)), log_every=4)[0]
    assert (summary.steps, summary.stopped) == (12, "nine steps are enough")  # at the next vote


def test_early_stopping_ends_at_the_evaluation_that_decided_it(tmp_path):
    recipe = replace(recipes.linear(), lr=0.0, callbacks=(hvdtrain.EarlyStopping("valid/loss", patience=2),))
    summary, _, _ = fit(recipe, epochs=9, run_dir=tmp_path)
    assert summary.steps == 3 * STEPS_PER_EPOCH
    assert "valid/loss has not improved in 2 evaluations" in summary.stopped
    assert (tmp_path / "checkpoints" / "step-00000048").is_dir()


def test_early_stopping_on_an_unknown_figure_names_the_known_ones():
    recipe = replace(recipes.linear(), callbacks=(hvdtrain.EarlyStopping("valid/f1"),))
    with pytest.raises(UsageError, match="valid/accuracy, valid/loss"):
        fit(recipe)


def test_the_learning_rate_is_a_function_of_the_step_also_after_a_resume(tmp_path):
    recipe = replace(recipes.linear(), lr=lr.warmup(lr.cosine(0.5, 32), 5))
    _, _, lines = fit(recipe, log_every=1)
    expected = {step: values["train/lr"] for step, values in lines.lines if "train/lr" in values}
    for stop in (3, 5, 12, None):
        _, _, lines = fit(replace(recipe, adapter=recipes.linear().adapter), run_dir=tmp_path, log_every=1, max_steps=stop)
        for step, values in lines.lines:
            if "train/lr" in values:
                assert values["train/lr"] == expected[step]


@pytest.mark.parametrize("source", ["arrays", "items", "source"])
def test_data_may_come_as_arrays_as_items_or_as_a_source(source):
    inputs, targets = recipes.arrays()

    class Items:
        def __len__(self) -> int:
            return len(inputs)

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
            return inputs[index], targets[index]

    data = {"arrays": (inputs, targets), "items": Items(), "source": recipes.RecordedSource((inputs, targets))}[source]
    reference = fit(max_steps=4)[1].adapter.weights
    assert np.array_equal(fit(replace(recipes.linear(), train=data), max_steps=4)[1].adapter.weights, reference)


def test_ranks_that_are_set_up_otherwise_are_told_apart():
    class Disagreeing(LocalCommunicator):
        def allgather(self, value, *, name):
            return [value, {**value, "seed": 99, "samples": 12}]

    with pytest.raises(HvdtrainError, match="rank 1 is set up otherwise than rank 0: samples 12 instead of 1003, seed 99"):
        Trainer(recipes.linear(), Disagreeing(World())).prepare()


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    class Lost(LinearAdapter):  # its gradients are finite all the same
        def train_step(self, batch, **more):
            return {**super().train_step(batch, **more), "loss": Mean(np.nan, 64)}

    recipe = replace(recipes.linear(), adapter=Lost(recipes.FEATURES, recipes.CLASSES))
    with pytest.raises(HvdtrainError, match=r"the training loss of rank 0 \(.*\) is nan in the steps up to 3") as caught:
        fit(recipe, run_dir=tmp_path, save_every=3, log_every=100)
    assert caught.value.on_all_ranks
    assert not (tmp_path / "checkpoints").exists()


def test_a_sample_that_fails_to_load_is_named():
    class Items:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            if index == 77:
                raise OSError("a bad disk")
            return np.zeros(recipes.FEATURES, np.float32), 0

    with pytest.raises(OSError, match="a bad disk") as caught:
        fit(replace(recipes.linear(), train=Items()))
    assert caught.value.__notes__ == ["while loading sample 77"]


def test_the_learning_rate_grows_with_the_batch_by_the_rule_and_not_again_on_resume(tmp_path):
    def rates(**options) -> list[float]:
        recipe = replace(recipes.linear(), lr=lr.warmup(lr.constant(0.1), 5))
        lines = fit(recipe, tmp_path, log_every=1, save_every=3, batch_size=256, lr_scale="sqrt", **options)[2]
        return [values["train/lr"] for _, values in lines.lines if "train/lr" in values]

    expected = [0.2 * min(1.0, (step + 1) / 5) for step in range(8)]
    assert rates(max_steps=3) + rates(max_steps=8) == pytest.approx(expected)  # 256 instead of 64: sqrt(4)


def test_a_rule_for_the_learning_rate_needs_one_in_the_recipe():
    with pytest.raises(UsageError, match="--lr-scale linear scales the recipe's lr, and the recipe gives none"):
        fit(lr_scale="linear")


def test_a_share_on_one_process_is_the_whole_and_an_unknown_host_is_refused():
    import socket

    assert fit(share=f"{socket.gethostname()}=3", max_steps=2)[0].steps == 2
    with pytest.raises(UsageError, match="no rank is on 'node9'"):
        fit(share="node9=2")


class Spoiled:
    """Adapters that fail in a step."""

    def __init__(self, inner, error):
        self.inner, self.error = inner, error

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def train_step(self, batch, **more):
        raise self.error


def failing_recipe(error):
    recipe = recipes.linear()
    spoiled = copy.copy(recipe)
    object.__setattr__(spoiled, "adapter", Spoiled(recipe.adapter, error))
    return spoiled


def test_gradients_that_are_not_finite_are_told_with_the_samples_of_the_rank_to_blame():
    trainer = Trainer(
        failing_recipe(NotFiniteError("the gradient of a is not finite on rank 0", "hint", 0)), LocalCommunicator(World())
    )
    trainer.prepare()
    first = next(trainer.place.sampler.epoch(0))
    with pytest.raises(HvdtrainError) as caught:
        trainer.fit()
    assert caught.value.message.endswith(f"on rank 0, in its {first}")
    assert str(first).startswith(f"samples {first.indices[0]}, {first.indices[1]}, ")
    assert caught.value.on_all_ranks


def test_any_other_error_of_a_step_is_told_with_this_ranks_samples():
    trainer = Trainer(failing_recipe(ValueError("mine")), LocalCommunicator(World()))
    trainer.prepare()
    with pytest.raises(ValueError, match="mine") as caught:
        trainer.fit()
    assert caught.value.__notes__ == [str(next(trainer.place.sampler.epoch(0)))]


def test_an_error_of_a_data_source_names_its_batch():
    class Broken:
        def __len__(self):
            return 100

        def take(self, indices):
            raise OSError("gone")

    loader = Loader(Broken(), Sampler(100, 10, shuffle=False), prefetch=0)
    with pytest.raises(OSError, match="gone") as caught:
        next(loader.epoch(0))
    assert caught.value.__notes__ == ["in the batch of samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"]


class Counting(hvdtrain.Callback):
    """Remembers what it was told, and hands it on to those who join."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_start(self, state: TrainState) -> None:
        self.told.append(f"start {state.step}")

    def on_evaluate(self, state: TrainState, values) -> None:
        self.told.append(f"evaluate {state.step}")

    def state_dict(self):
        return {"told": self.told.copy()}

    def load_state_dict(self, state) -> None:
        self.told = list(state["told"])


class LosesARank:
    """The communicator of a single process, one of whose collectives fails."""

    def __init__(self, world: World) -> None:
        self._inner, self.calls = LocalCommunicator(world), {}

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def allreduce(self, values, *, name: str, op="sum"):
        self.calls[name] = self.calls.get(name, 0) - 1
        if self.calls[name] == 0:
            raise RuntimeError("Horovod has been shut down")
        return self._inner.allreduce(values, name=name, op=op)


def fails_once(method, at: int):
    """The ``at``-th call of ``method`` ends as if another rank were lost."""
    calls = 0

    def called(*arguments, **more):
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("Horovod has been shut down")
        return method(*arguments, **more)

    return called


INTERRUPTED = [
    ("train_step", 20),
    ("eval_step", 2),
    ("metrics/train", 5),
    ("metrics/valid", 1),
    ("stop/votes", 2),  # of the first evaluation; the first one is at step 1
    ("checkpoint/written", 3),
]


@pytest.mark.parametrize(("what", "at"), INTERRUPTED)
def test_what_a_lost_rank_interrupts_is_done_once_and_nothing_else_twice(tmp_path: Path, what: str, at: int):
    whole = recipes.linear()
    fit(replace(whole, callbacks=(Counting(),)), log_every=4)
    recipe = replace(recipes.linear(), callbacks=(Counting(),))
    adapter, elastic, lines = recipe.adapter, LocalCommunicator(World(elastic=True)), Lines()
    losing = LosesARank(World(elastic=True))
    if hasattr(adapter, what):
        setattr(adapter, what, fails_once(getattr(adapter, what), at))
    else:
        losing.calls = {what: at}
    trainer = Trainer(recipe, losing, options=Options(log_every=4), run_dir=RunDir(tmp_path))
    trainer.prepare()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.fit([lines])
    stood_at = trainer.state.step
    trainer.move(elastic)
    assert trainer.prepare().step == stood_at
    summary = trainer.fit([lines])
    assert (summary.steps, summary.samples) == (2 * STEPS_PER_EPOCH, 2 * 1003)
    assert np.array_equal(adapter.weights, whole.adapter.weights)
    assert recipe.callbacks[0].told == ["start 0", f"evaluate {STEPS_PER_EPOCH}", f"evaluate {2 * STEPS_PER_EPOCH}"]
    assert lines.steps("train/loss") == [4, 8, 12, 16, 20, 24, 28, 32]
    assert lines.steps("valid/loss") == [16, 32]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000016", "step-00000032"]


def test_when_hosts_change_all_ranks_stop_after_a_step_and_go_on_there():
    recipe, elastic = recipes.linear(), LocalCommunicator(World(elastic=True))
    news = iter([False, False, True])
    trainer = Trainer(recipe, elastic, options=Options(log_every=4), changes=lambda: next(news, False))
    trainer.prepare()
    with pytest.raises(HostsChangedError):
        trainer.fit()
    assert 0 < trainer.state.step < STEPS_PER_EPOCH
    trainer.move(elastic)
    trainer.prepare()
    trainer.fit()
    whole = recipes.linear()
    fit(whole)
    assert np.array_equal(recipe.adapter.weights, whole.adapter.weights)


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name[-2:] for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("lost_in", ["a step", "what follows a step", "the last wait"])
def test_a_checkpoint_that_is_lost_with_the_rank_that_wrote_it_is_saved_again(tmp_path: Path, lost_in: str):
    """Here the new primary is the same process, which is made to have no part in the first write."""
    recipe, elastic, lines = recipes.linear(), LocalCommunicator(World(elastic=True)), Lines()
    losing = LosesARank(World(elastic=True))
    if lost_in == "a step":
        recipe.adapter.train_step = fails_once(recipe.adapter.train_step, 20)  # type: ignore[method-assign]
    else:
        losing.calls = {"metrics/train": 5} if lost_in == "what follows a step" else {"checkpoint/written": 3}
    trainer = Trainer(recipe, losing, options=Options(log_every=4), run_dir=RunDir(tmp_path))
    trainer.prepare()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.fit([lines])
    stood_at = trainer.state.step
    assert stood_at == {"a step": 19, "what follows a step": 20, "the last wait": 32}[lost_in]
    shutil.rmtree(tmp_path / "checkpoints")
    trainer._handover.saving(mine=False)
    trainer.move(elastic)
    trainer.prepare()
    trainer.fit([lines])
    assert saved(tmp_path) == sorted({str(stood_at), "32"})
    assert lines.steps("valid/loss") == [16, 32]


def test_the_checkpoint_is_whole_before_the_ranks_meet_as_hosts_changed(tmp_path: Path):
    recipe, elastic, written = recipes.linear(), LocalCommunicator(World(elastic=True)), []

    def slow_snapshot(snapshot=recipe.adapter.snapshot):
        write = snapshot()
        return lambda directory: (time.sleep(0.2), write(directory))

    recipe.adapter.snapshot = slow_snapshot  # type: ignore[method-assign]
    news = iter([False, True])
    trainer = Trainer(
        recipe, elastic, options=Options(log_every=4, save_every=4), run_dir=RunDir(tmp_path), changes=lambda: next(news, False)
    )
    trainer.prepare()
    trainer.checkpoints.close = lambda: written.append(saved(tmp_path))  # type: ignore[method-assign]
    with pytest.raises(HostsChangedError):
        trainer.fit()
    assert written == [["04"]]


def test_a_joining_rank_knows_where_the_job_began(tmp_path: Path):
    fit(run_dir=tmp_path, max_steps=9)
    trainer = Trainer(
        recipes.linear(), LocalCommunicator(World(elastic=True)), options=Options(max_steps=20), run_dir=RunDir(tmp_path)
    )
    trainer.prepare()
    trainer.fit()
    trainer.move(LocalCommunicator(World(elastic=True)))
    trainer.prepare()
    assert (trainer.first_step, trainer.state.step) == (9, 20)


@pytest.mark.parametrize("stop_at", [10, 12])
def test_a_stop_at_a_step_to_evaluate_evaluates_first_and_a_resume_does_not_again(tmp_path: Path, stop_at: int):
    stops, lines = Stops(), Lines()

    class Asks(hvdtrain.Callback):
        def on_step_end(self, state: TrainState) -> None:
            if state.step == stop_at:
                stops._signal = "SIGTERM"

    trainer = Trainer(
        replace(recipes.linear(), callbacks=(Asks(),)), LocalCommunicator(World()),
        options=Options(eval_every=5, log_every=2), run_dir=RunDir(tmp_path), stops=stops,
    )  # fmt: skip
    trainer.prepare()
    with pytest.raises(StoppedError, match=rf"stopped in order \(SIGTERM\) at step {stop_at}; the checkpoint of step"):
        trainer.fit([lines])
    assert lines.steps("valid/loss") == [5, 10]
    assert fit(run_dir=tmp_path, eval_every=5)[2].steps("valid/loss") == [15, 20, 25, 30, 32]


def test_figures_of_a_checkpoint_that_is_not_the_end_are_not_those_of_the_end(tmp_path: Path):
    fit(run_dir=tmp_path, max_steps=16)
    without = replace(recipes.linear(), valid=None)
    assert fit(without, run_dir=tmp_path)[0].valid == {}


class JoinsOneThatIsLost(LocalCommunicator):
    """Two ranks, of which the first stands at step 7 and goes while this one takes over its weights."""

    def allgather(self, value, *, name: str):
        return [Standing(7), value] if name == "setup/standing" else [value]

    def broadcast(self, value, *, name: str, root: int = 0):
        if name == "state":
            raise RuntimeError("Horovod has been shut down")
        return Held(TrainState(7)) if name == "setup/held" else value


def test_what_was_half_taken_over_is_trained_on_from_a_checkpoint_or_not_at_all(tmp_path: Path):
    fit(run_dir=tmp_path / "with", max_steps=5)
    for run_dir in (RunDir(tmp_path / "with"), None):
        trainer = Trainer(recipes.linear(), JoinsOneThatIsLost(World(1, 2, elastic=True)), run_dir=run_dir)
        with pytest.raises(RuntimeError, match="shut down"):
            trainer.prepare()
        trainer.move(LocalCommunicator(World(elastic=True)))
        if run_dir is not None:
            assert trainer.prepare().step == 5
            assert trainer.fit().steps == 32
        else:
            with pytest.raises(HvdtrainError, match="the ranks that held the state of the training are lost") as caught:
                trainer.prepare()
            assert caught.value.on_all_ranks


def test_a_gradient_that_is_not_finite_names_its_samples_in_numpy_too():
    recipe = replace(recipes.linear(), train=(np.full((640, recipes.FEATURES), np.nan), np.zeros(640, int)))
    with pytest.raises(
        HvdtrainError, match=r"the gradient of weights is not finite on rank 0 .*, where the loss is nan, in its samples"
    ):
        fit(recipe)


def test_a_source_that_gives_fewer_samples_than_it_was_asked_for_is_told():
    class Short:
        def __len__(self):
            return 100

        def take(self, indices):
            return np.zeros((len(indices) - 1, recipes.FEATURES)), np.zeros(len(indices) - 1, int)

    with pytest.raises(HvdtrainError, match="the data source gave 63 samples for 64 indices"):
        fit(replace(recipes.linear(), train=Short()))
