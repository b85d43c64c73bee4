"""A checkpoint is whole or not there, and nothing that was saved is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import checkpoint
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState
from hvdtrain.world import World
from tests.support import recipes

COMM = LocalCommunicator(World())
DATA = {"samples": 1003, "seed": 5, "shuffle": True}


@pytest.fixture
def adapter():
    made = recipes.linear().adapter
    made.setup(COMM)
    return made


def save(root: Path, step: int, adapter, keep: int = 3) -> Path:
    adapter.weights[:] = step
    return checkpoint.save(root, TrainState(step=step, position=step * 64), DATA, adapter, COMM, keep=keep)


def test_what_was_saved_is_loaded(tmp_path, adapter):
    save(tmp_path, 3, adapter)
    adapter.weights[:] = -1
    found = checkpoint.resume(tmp_path, adapter, COMM)
    assert (found.state, found.data) == (TrainState(step=3, position=192), DATA)
    assert (adapter.weights == 3).all()


def test_the_manifest_lists_every_file_with_its_sum(tmp_path, adapter):
    path = save(tmp_path, 1, adapter)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {"state.json", "model/linear.npz"}


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path, adapter, keep, left):
    for step in range(1, 6):
        save(tmp_path, step, adapter, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


def test_a_newer_damaged_checkpoint_does_not_push_out_the_good_ones(tmp_path, adapter):
    save(tmp_path, 4, adapter)
    DAMAGES["a byte flipped"](save(tmp_path, 8, adapter))
    save(tmp_path, 6, adapter, keep=1)
    assert checkpoint.latest(tmp_path).state.step == 6


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint(tmp_path, adapter):
    (tmp_path / ".part-step-00000003" / "model").mkdir(parents=True)
    save(tmp_path, 4, adapter)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a byte flipped": lambda path: flip_a_byte(path / "model/linear.npz"),
    "a file cut short": lambda path: (path / "model/linear.npz").write_bytes((path / "model/linear.npz").read_bytes()[:-1]),
    "a file missing": lambda path: (path / "model/linear.npz").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"files": {'),
    "a foreign manifest": lambda path: (path / "manifest.json").write_text("[]"),
    "a state cut short": lambda path: (path / "state.json").write_text(""),
    "an empty directory": lambda path: [shutil.rmtree(path), path.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(tmp_path, adapter, caplog, damage):
    save(tmp_path, 1, adapter)
    DAMAGES[damage](save(tmp_path, 2, adapter))
    found = checkpoint.resume(tmp_path, adapter, COMM)
    assert found.state.step == 1
    assert (adapter.weights == 1).all()
    assert "step-00000002 is damaged" in caplog.text


def test_a_damaged_checkpoint_asked_for_by_name_is_refused_and_a_whole_one_named(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    DAMAGES["a byte flipped"](save(tmp_path, 2, adapter))
    with pytest.raises(UsageError, match="SHA-256") as caught:
        checkpoint.resume(tmp_path / "step-00000002", adapter, COMM)
    assert "step-00000001 is whole" in caught.value.hint


def test_nothing_to_resume_is_an_error_only_where_it_was_asked_for(tmp_path, adapter):
    assert checkpoint.resume(tmp_path / "none", adapter, COMM) is None
    with pytest.raises(UsageError, match="does not exist"):
        checkpoint.resume(tmp_path / "none", adapter, COMM, required=True)
    with pytest.raises(UsageError, match="no whole checkpoint"):
        checkpoint.resume(tmp_path, adapter, COMM, required=True)


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    from hvdtrain.adapters.linear import LinearAdapter

    other = LinearAdapter(3, 2)
    other.setup(COMM)
    with pytest.raises(HvdtrainError, match=r"does not fit this recipe.*shape"):
        checkpoint.resume(tmp_path, other, COMM)


def test_a_failed_write_keeps_the_older_checkpoint_and_leaves_no_part(tmp_path, adapter):
    save(tmp_path, 1, adapter, keep=1)

    class Failing:
        def save(self, directory: Path) -> None:
            (directory / "half").write_text("x")
            raise RuntimeError("the writer broke")

    with pytest.raises(HvdtrainError, match="could not be written: RuntimeError: the writer broke"):
        checkpoint.save(tmp_path, TrainState(step=2), DATA, Failing(), COMM, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.latest(tmp_path).state.step == 1


def test_a_step_saved_again_replaces_the_first(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    adapter.weights[:] = 9
    checkpoint.save(tmp_path, TrainState(step=1, epoch=4), DATA, adapter, COMM, keep=2)
    assert checkpoint.latest(tmp_path).state.epoch == 4
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """The saving process is killed while it saves again and again; what is left loads."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from tests.test_checkpoint import COMM, save
from tests.support import recipes
adapter = recipes.linear().adapter
adapter.setup(COMM)
for step in range(1, 100000):
    save(Path({str(tmp_path)!r}), step, adapter, keep=2)
    print(step, flush=True)
"""
    adapter = recipes.linear().adapter
    adapter.setup(COMM)
    for done in (1, 3, 6):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        last = [int(writer.stdout.readline()) for _ in range(done)][-1]
        writer.kill()
        last = int((writer.communicate()[0].split() or [last])[-1])
        found = checkpoint.resume(tmp_path, adapter, COMM)
        assert found.state.step >= last
        assert (adapter.weights == found.state.step).all()
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


@pytest.mark.skipif("not __import__('os').geteuid() == 0", reason="mounting a small file system needs root")
@pytest.mark.parametrize("framework", ["linear", "torch", "keras"])
def test_a_full_disk_says_so_and_keeps_the_old_checkpoint(tmp_path, framework):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        adapter = getattr(recipes, framework)().adapter
        adapter.setup(COMM)
        adapter.train_step(recipes.arrays(8), lr=None, weight=1.0)
        checkpoint.save(small, TrainState(step=1), DATA, adapter, COMM, keep=1)
        free = shutil.disk_usage(small).free
        (small / "filler").write_bytes(b"x" * (free - 4096))
        with pytest.raises(HvdtrainError, match="the disk is full"):
            checkpoint.save(small, TrainState(step=2), DATA, adapter, COMM, keep=1)
        assert checkpoint.resume(small, adapter, COMM).state.step == 1
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)
