"""One decision of all ranks about what to resume."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.resume import changed, refuse_newer, resume
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState
from tests.support.checkpoints import COMM, DAMAGES, DATA, save


def test_what_was_saved_is_loaded(tmp_path, adapter):
    save(tmp_path, 3, adapter)
    adapter.weights[:] = -1
    found = resume(tmp_path, adapter, COMM)
    assert (found.state, found.content.data) == (TrainState(step=3, position=192), DATA)
    assert (adapter.weights == 3).all()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(tmp_path, adapter, caplog, damage):
    save(tmp_path, 1, adapter)
    DAMAGES[damage](save(tmp_path, 2, adapter))
    found = resume(tmp_path, adapter, COMM)
    assert found.state.step == 1
    assert (adapter.weights == 1).all()
    assert "step-00000002 is damaged" in caplog.text


def test_a_damaged_checkpoint_asked_for_by_name_is_refused_and_a_whole_one_named(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    DAMAGES["a byte flipped"](save(tmp_path, 2, adapter))
    with pytest.raises(UsageError, match="SHA-256") as caught:
        resume(tmp_path / "step-00000002", adapter, COMM)
    assert "step-00000001 is whole" in caught.value.hint


def test_nothing_to_resume_is_an_error_only_where_it_was_asked_for(tmp_path, adapter):
    assert resume(tmp_path / "none", adapter, COMM) is None
    with pytest.raises(UsageError, match="does not exist"):
        resume(tmp_path / "none", adapter, COMM, required=True)
    with pytest.raises(UsageError, match="no whole checkpoint"):
        resume(tmp_path, adapter, COMM, required=True)


def test_checkpoints_that_are_all_damaged_are_an_error_and_no_new_beginning(tmp_path, adapter):
    for step in (1, 2):
        DAMAGES["a byte flipped"](save(tmp_path / "checkpoints", step, adapter))
    with pytest.raises(UsageError, match="no whole checkpoint, all of them are damaged") as caught:
        resume(tmp_path, adapter, COMM)
    assert "--resume never --run-dir NEW" in caught.value.hint


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model/model.npz", "."])
def test_what_cannot_be_read_for_the_moment_is_no_damage(tmp_path, adapter, monkeypatch, name):
    save(tmp_path, 1, adapter)
    lost = save(tmp_path, 2, adapter) / name if name != "." else tmp_path
    for method, original in [(method, getattr(Path, method)) for method in ("open", "read_text", "iterdir")]:

        def refuse(path, *arguments, real=original, **options):
            if path == lost:
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *arguments, **options)

        monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(HvdtrainError, match=f"{re.escape(str(lost))} cannot be read: Input/output error"):
        resume(tmp_path, adapter, COMM)


def test_a_file_that_cannot_be_read_in_the_end_is_no_recipe_that_does_not_fit(tmp_path, adapter, monkeypatch):
    save(tmp_path, 1, adapter)

    def load(directory):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(adapter, "load", load)
    with pytest.raises(HvdtrainError, match="model cannot be read: Stale file handle"):
        resume(tmp_path, adapter, COMM)


def test_newer_checkpoints_are_looked_for_without_reading_them(tmp_path, adapter, monkeypatch):
    DAMAGES["a file cut short"](save(tmp_path, 9, adapter))
    save(tmp_path, 2, adapter)
    monkeypatch.setattr(files, "sha256", lambda path: pytest.fail(f"{path} was read"))
    refuse_newer(tmp_path, 2, COMM)
    with pytest.raises(UsageError, match="holds step-00000002, which is newer"):
        refuse_newer(tmp_path, 1, COMM)


def test_settings_that_changed_are_told_and_secrets_are_not():
    then, now = {"lr": 1, "api_key": "abc", "more": {"password": "x"}}, {"lr": 2, "api_key": "def", "more": {"password": "y"}}
    assert changed(then, now) == "lr 2 instead of 1"


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    from hvdtrain.adapters.linear import LinearAdapter

    other = LinearAdapter(3, 2)
    other.setup(COMM)
    with pytest.raises(HvdtrainError, match=r"does not fit this recipe.*shape"):
        resume(tmp_path, other, COMM)
