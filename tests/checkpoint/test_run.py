"""What a run puts into its checkpoints, and what comes back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

import hvdtrain
from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.checkpoint.files import latest
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.config import Options
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.rundir import RunDir
from hvdtrain.trainer import Trainer
from hvdtrain.world import World
from tests.support import recipes
from tests.test_trainer import STEPS_PER_EPOCH, fit


def never_better(**more):
    stopping = hvdtrain.EarlyStopping("valid/loss", patience=2)
    return replace(recipes.linear(), lr=0.0, epochs=9, callbacks=(stopping,), **more)


def test_the_best_step_is_saved_when_it_is_evaluated_and_kept(tmp_path):
    _, _, lines = fit(run_dir=tmp_path, eval_every=5, save_every=12, keep=1, keep_best="valid/accuracy:max")
    accuracy = {step: values["valid/accuracy"] for step, values in lines.lines if "valid/accuracy" in values}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == sorted({"best", f"step-{best:08d}", "step-00000032"})
    content = latest(root / "best").content if best == 32 else latest(root).content
    assert (content.best.step, content.best.value) == (best, accuracy[best])


def test_the_best_is_known_after_a_resume_too(tmp_path):
    first = fit(run_dir=tmp_path, max_steps=16, keep=1, keep_best="valid/loss:min")[2]
    assert first.steps("valid/loss") == [16]
    worse = replace(recipes.linear(), lr=50.0)
    fit(worse, run_dir=tmp_path, keep=1, keep_best="valid/loss:min")
    assert (tmp_path / "checkpoints/best").readlink().name == "step-00000016"
    assert latest(tmp_path / "checkpoints").content.best.step == 16


def test_the_best_of_another_run_is_not_this_run_s(tmp_path):
    fit(run_dir=tmp_path / "a", max_steps=16, keep_best="valid/loss:min")
    worse = replace(recipes.linear(), lr=50.0)
    fit(worse, run_dir=tmp_path / "b", resume=str(tmp_path / "a"), keep_best="valid/loss:min")
    assert (tmp_path / "b/checkpoints/best").readlink().name == "step-00000032"


def test_a_best_that_cannot_be_is_refused_before_the_first_step():
    with pytest.raises(UsageError, match="needs validation data"):
        fit(replace(recipes.linear(), valid=None), keep_best="valid/loss:min")
    with pytest.raises(UsageError, match="name of a validation figure"):
        fit(keep_best="valid/loss")


def test_early_stopping_counts_on_after_a_resume(tmp_path):
    for steps in (STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH, None):
        summary, _, _ = fit(never_better(), run_dir=tmp_path, max_steps=steps)
    assert summary.steps == 3 * STEPS_PER_EPOCH
    assert summary.stopped == "valid/loss has not improved in 2 evaluations"


def test_a_run_that_was_stopped_early_stays_so_until_its_checkpoint_is_named(tmp_path):
    first = fit(never_better(), run_dir=tmp_path)[0]
    again, trainer, lines = fit(never_better(), run_dir=tmp_path)
    assert (again.steps, again.stopped, again.valid) == (first.steps, first.stopped, first.valid)
    assert trainer.total_steps == first.steps
    assert lines.lines == []  # nothing is evaluated again
    checkpoint = str(tmp_path / "checkpoints" / "step-00000048")
    on = fit(never_better(), run_dir=tmp_path, resume=checkpoint)[0]
    assert on.steps == first.steps + 2 * STEPS_PER_EPOCH


def test_a_callbacks_state_comes_back_on_every_rank_and_each_ones_own(tmp_path, caplog):
    class Counting(hvdtrain.Callback):
        def __init__(self, start: int) -> None:
            self.count = start

        def on_step_end(self, state) -> None:
            self.count += 1

        def state_dict(self):
            return {"count": np.float32(self.count)}  # as people's figures are

        def load_state_dict(self, state) -> None:
            self.count = state["count"]

    class Silent(hvdtrain.Callback):
        pass

    first = Counting(0), Silent(), Counting(100)
    fit(replace(recipes.linear(), callbacks=first), run_dir=tmp_path, max_steps=5)
    second = Counting(0), Counting(0)
    fit(replace(recipes.linear(), callbacks=second), run_dir=tmp_path, max_steps=7)
    assert [callback.count for callback in second] == [7, 107]
    fit(run_dir=tmp_path, max_steps=8)
    assert "Counting" in caplog.text


def test_callbacks_of_one_class_keep_their_places_where_one_has_no_state(tmp_path):
    class Sometimes(hvdtrain.Callback):
        def __init__(self, value: int | None = None) -> None:
            self.value = value

        def state_dict(self):
            return {} if self.value is None else {"value": self.value}

        def load_state_dict(self, state) -> None:
            self.value = state["value"]

    fit(replace(recipes.linear(), callbacks=(Sometimes(), Sometimes(7))), run_dir=tmp_path, max_steps=2)
    again = Sometimes(), Sometimes()
    fit(replace(recipes.linear(), callbacks=again), run_dir=tmp_path, max_steps=3)
    assert [callback.value for callback in again] == [None, 7]


def test_secrets_among_the_settings_are_not_stored(tmp_path):
    settings = {"api_token": "s3cret", "lr": 0.1}
    options, run_dir = Options(max_steps=1), RunDir(tmp_path)
    trainer = Trainer(recipes.linear(), LocalCommunicator(World()), options=options, run_dir=run_dir, settings=settings)
    trainer.prepare()
    trainer.fit()
    text = (latest(tmp_path / "checkpoints").path / "state.json").read_text()
    assert "s3cret" not in text
    assert json.loads(text)["settings"] == {"api_token": "***", "lr": 0.1}


def test_a_callback_whose_keys_are_no_texts_is_named(tmp_path):
    class Wrong(hvdtrain.Callback):
        def state_dict(self):
            return {(1, 2): 3}

    with pytest.raises(HvdtrainError, match=r"state_dict\(\) of the callback .*Wrong cannot be stored: keys must be"):
        fit(replace(recipes.linear(), callbacks=(Wrong(),)), run_dir=tmp_path, max_steps=2)


def test_a_callback_whose_state_is_no_plain_value_is_named(tmp_path):
    class Wrong(hvdtrain.Callback):
        def state_dict(self):
            return {"array": np.zeros(3)}

    with pytest.raises(HvdtrainError, match=r"state_dict\(\) of the callback .*Wrong holds ndarray"):
        fit(replace(recipes.linear(), callbacks=(Wrong(),)), run_dir=tmp_path, max_steps=2)


def test_a_checkpoint_that_does_not_fit_names_the_settings_that_changed(tmp_path):
    def prepare(features: int, settings):
        recipe = replace(recipes.linear(), adapter=LinearAdapter(features, recipes.CLASSES))
        trainer = Trainer(
            recipe, LocalCommunicator(World()), options=Options(max_steps=1), run_dir=RunDir(tmp_path), settings=settings
        )
        trainer.prepare()
        return trainer

    prepare(recipes.FEATURES, {"width": 12, "lr": 0.1, "kind": "a"}).fit()
    with pytest.raises(HvdtrainError, match=r"does not fit this recipe.*settings that changed since: width 13 instead of 12"):
        prepare(13, {"width": 13, "lr": 0.1, "kind": "a"})
    same = prepare(recipes.FEATURES, {"width": 12, "lr": 0.2, "new": 1})
    assert same.changed == "lr 0.2 instead of 0.1, kind no more instead of a, new 1 instead of none"


def test_a_write_that_fails_ends_the_run_at_the_next_vote_and_not_only_at_the_next_checkpoint(tmp_path):
    class Failing(LinearAdapter):
        def snapshot(self):
            def write(directory):
                raise OSError(5, "a bad disk")

            return write

    recipe = replace(recipes.linear(), adapter=Failing(recipes.FEATURES, recipes.CLASSES), epochs=50)
    options = Options(save_every=400, log_every=1)
    trainer = Trainer(recipe, LocalCommunicator(World()), options=options, run_dir=RunDir(tmp_path))
    trainer.prepare()
    with pytest.raises(HvdtrainError, match="a bad disk") as caught:
        trainer.fit()
    assert caught.value.on_all_ranks
    assert 400 < trainer.state.step < 800


def test_state_json_has_a_format_and_a_newer_one_is_refused_not_passed_over(tmp_path):
    fit(run_dir=tmp_path, max_steps=4, save_every=2)
    newest = tmp_path / "checkpoints/step-00000004"
    content = json.loads((newest / "state.json").read_text())
    assert content["format"] == 1
    text = json.dumps(content | {"format": 2})
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (newest / "state.json").write_text(text)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="has format 2, this version of hvdtrain reads format 1"):
        fit(run_dir=tmp_path)
