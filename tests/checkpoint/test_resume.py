"""One decision of all ranks about what to resume."""

from __future__ import annotations

import pytest

from hvdtrain.checkpoint.resume import resume
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState
from tests.support import recipes
from tests.support.checkpoints import COMM, DAMAGES, DATA, save


@pytest.fixture
def adapter():
    made = recipes.linear().adapter
    made.setup(COMM)
    return made


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


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    from hvdtrain.adapters.linear import LinearAdapter

    other = LinearAdapter(3, 2)
    other.setup(COMM)
    with pytest.raises(HvdtrainError, match=r"does not fit this recipe.*shape"):
        resume(tmp_path, other, COMM)
