"""``hvdtrain checkpoint``: what people and programs see of a run's checkpoints."""

from __future__ import annotations

import json
import resource
import shutil

import numpy as np
import pytest

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import Content
from hvdtrain.checkpoint.writer import write
from hvdtrain.cli import main
from hvdtrain.state import TrainState
from tests.support import recipes
from tests.support.checkpoints import COMM, DAMAGES, save


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, of which the second is the best."""
    adapter = recipes.linear().adapter
    adapter.setup(COMM)
    for step, loss, best in ((1, 3.0, 1), (2, 1.0, 2), (3, float("nan"), 2)):
        more = {"valid": {"valid/loss": loss}, "best": Best("valid/loss", "min", 1.0, best), "framework": "numpy"}
        save(tmp_path / "run/checkpoints", step, adapter, **more)
    return tmp_path / "run"


def test_a_list_shows_each_checkpoint_and_the_best(run, capsys):
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000001", "step-00000002", "step-00000003"]
    assert [line.endswith("  best") for line in lines] == [False, True, False]
    assert "valid/loss 1" in lines[1]
    assert main(["checkpoint", "list", str(run / "checkpoints"), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(entry["step"], entry["valid"]["valid/loss"], entry["best"]) for entry in entries] == [
        (1, 3.0, False),
        (2, 1.0, True),
        (3, None, False),
    ]


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_named_and_gives_exit_code_1(run, capsys, damage):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole") == 3
    DAMAGES[damage](run / "checkpoints/step-00000002")
    assert main(["checkpoint", "verify", str(run)]) == 1
    found = capsys.readouterr().out.splitlines()
    assert [line.endswith(": whole") for line in found] == [True, False, True]
    name = {"a byte flipped": "model/model.npz", "a file cut short": "model/model.npz", "a file missing": "model/model.npz"}
    assert name.get(damage, "state.json" if damage == "a state cut short" else "manifest.json") in found[1]
    assert main(["checkpoint", "list", str(run)]) == 0


def test_a_damaged_checkpoint_is_not_exported_and_the_run_s_last_whole_one_is(run, tmp_path, capsys):
    DAMAGES["a byte flipped"](run / "checkpoints/step-00000003")
    assert main(["checkpoint", "export", str(run / "checkpoints/step-00000003"), str(tmp_path / "x.npz")]) == 2
    assert "step-00000002 is whole" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(run), str(tmp_path / "x.npz")]) == 0
    assert (np.load(tmp_path / "x.npz")["weights"] == 2).all()
    assert main(["checkpoint", "export", str(run / "checkpoints/best"), str(tmp_path / "x.npz")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(run), str(tmp_path / "x.pt")]) == 2
    assert "does not end in .npz" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("where", ["nothing", "."])
def test_where_there_is_no_checkpoint_it_is_said(tmp_path, monkeypatch, capsys, where):
    monkeypatch.chdir(tmp_path)
    for arguments in (["list", where], ["verify", where], ["export", where, "x.pt"]):
        assert main(["checkpoint", *arguments]) == 2
        assert f"{where} {'does not exist' if where == 'nothing' else 'holds no checkpoint'}" in capsys.readouterr().err


def checkpoint_of(adapter, tmp_path):
    adapter.setup(COMM)
    content = Content(TrainState(step=1), {}, framework=adapter.framework)
    return write(tmp_path / "checkpoints", content, adapter.snapshot(), keep=1)


def test_torch_weights_load_into_a_plain_model(tmp_path):
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    adapter = recipes.torch().adapter
    checkpoint_of(adapter, tmp_path)
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.pt")]) == 0
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors")]) == 0
    for state in (torch.load(tmp_path / "a.pt", weights_only=True), safetensors.load_file(tmp_path / "a.safetensors")):
        other = recipes.torch().adapter.model
        torch.nn.init.zeros_(other[0].weight)
        other.load_state_dict(state)
        assert torch.equal(other[0].weight, adapter.model[0].weight)


def test_torch_weights_for_a_disk_that_is_full_are_an_error_without_a_traceback(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    adapter = recipes.torch().adapter
    adapter.model.register_buffer("large", torch.zeros(100_000))
    checkpoint_of(adapter, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        code = main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.pt")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert (code, "a.pt cannot be written" in error, "Traceback" in error) == (2, True, False), error
    assert not list(tmp_path.glob("*a.pt*"))


def test_a_checkpoint_that_is_removed_while_it_is_listed_is_left_out(run, monkeypatch, capsys):
    real = files.size_of

    def size_of(path):
        size = real(path)
        if path.name == "step-00000001":
            shutil.rmtree(path)
            return real(path)
        return size

    monkeypatch.setattr(files, "size_of", size_of)
    assert main(["checkpoint", "list", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-00000002", "step-00000003"]


def test_torch_weights_that_safetensors_cannot_hold_are_exported_as_pt(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    adapter = recipes.torch().adapter
    adapter.model.register_buffer("phases", torch.tensor([1j]))
    checkpoint_of(adapter, tmp_path)
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors")]) == 2
    assert "a.pt" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.pt")]) == 0
    adapter.model.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))


def test_keras_weights_load_into_a_plain_model(tmp_path):
    pytest.importorskip("keras")
    adapter = recipes.keras().adapter
    checkpoint_of(adapter, tmp_path)
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.weights.h5")]) == 0
    other = recipes.keras().adapter.model
    other.trainable_variables[0].assign(other.trainable_variables[0] * 0)
    other.load_weights(tmp_path / "a.weights.h5")
    assert np.array_equal(other.trainable_variables[0].value.numpy(), adapter.model.trainable_variables[0].value.numpy())
