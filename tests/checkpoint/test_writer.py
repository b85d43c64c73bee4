"""A checkpoint is whole or not there, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.checkpoint import writer
from hvdtrain.checkpoint.best import Best
from hvdtrain.checkpoint.files import Content, latest
from hvdtrain.checkpoint.resume import resume
from hvdtrain.checkpoint.writer import Saver, write
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE
from hvdtrain.rundir import RunDir
from hvdtrain.state import TrainState
from hvdtrain.world import World
from tests.support import recipes
from tests.support.checkpoints import COMM, DAMAGES, DATA, save
from tests.support.harness import ROOT


def test_the_manifest_lists_every_file_with_its_sum(tmp_path, adapter):
    path = save(tmp_path, 1, adapter)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {"state.json", "model/model.npz", "model/optimizer.npz"}


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path, adapter, keep, left):
    for step in range(1, 6):
        save(tmp_path, step, adapter, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


def test_a_newer_damaged_checkpoint_does_not_push_out_the_good_ones(tmp_path, adapter):
    save(tmp_path, 4, adapter)
    DAMAGES["a byte flipped"](save(tmp_path, 8, adapter))
    save(tmp_path, 6, adapter, keep=1)
    assert latest(tmp_path).state.step == 6


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint(tmp_path, adapter):
    root = tmp_path / "run/checkpoints"
    (root / ".part-step-00000003.other.7" / "model").mkdir(parents=True)
    time.sleep(0.02)  # file systems count time in ticks
    lock = RunDir(root.parent).claim()
    (root / ".part-step-00000005.other.8" / "model").mkdir(parents=True)  # of a rank that this job lost, and that still writes
    save(root, 4, adapter)
    assert sorted(path.name for path in root.iterdir()) == [".part-step-00000005.other.8", "step-00000004"]
    lock.close()


def test_two_writers_of_the_same_step_do_not_share_a_directory(tmp_path, monkeypatch):
    used = []
    for process in (7, 8):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        write(tmp_path, Content(TrainState(step=1), DATA), lambda directory: used.append(directory.parent.name), keep=1)
    assert used[0] != used[1]


def test_a_failed_write_keeps_the_older_checkpoint_and_leaves_no_part(tmp_path, adapter):
    save(tmp_path, 1, adapter, keep=1)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("the writer broke")

    with pytest.raises(HvdtrainError, match="could not be written: RuntimeError: the writer broke"):
        write(tmp_path, Content(TrainState(step=2), DATA), fail, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert latest(tmp_path).state.step == 1


def test_a_step_saved_again_replaces_the_first(tmp_path, adapter):
    save(tmp_path, 1, adapter)
    write(tmp_path, Content(TrainState(step=1, epoch=4), DATA), adapter.snapshot(), keep=2)
    assert latest(tmp_path).state.epoch == 4
    assert len(list(tmp_path.iterdir())) == 1


def test_a_step_saved_again_is_there_until_the_new_one_is(tmp_path, adapter, monkeypatch):
    path = save(tmp_path, 1, adapter)
    real = os.rename

    def rename(source, target):
        if Path(target) == path and (Path(source) / "model/one").exists():
            raise OSError(errno.EIO, "a bad disk")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(HvdtrainError, match="a bad disk"):
        write(tmp_path, Content(TrainState(step=1), DATA), lambda directory: (directory / "one").touch(), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert latest(tmp_path).path == path


def test_what_goes_wrong_after_the_checkpoint_is_whole_is_a_warning(tmp_path, adapter, monkeypatch, caplog):
    save(tmp_path, 1, adapter)
    save(tmp_path, 2, adapter)
    real = os.rename

    def rename(source, target):
        if ".part-old-" in str(target):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(source, target)

    def replace(source, target):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 3, adapter, 1, best=Best("valid/loss", "min", 0.5, 3))
    assert latest(tmp_path).state.step == 3
    for text in ("step-00000001 cannot be removed", "step-00000002 cannot be removed", "best cannot be made the link to step"):
        assert text in caplog.text


def test_a_file_system_that_syncs_no_directories_is_written_to(tmp_path, adapter, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert latest(save(tmp_path, 1, adapter).parent).state.step == 1


def test_the_best_is_marked_and_kept_beside_the_newest(tmp_path, adapter):
    for step, best in enumerate([1, 2, 2, 2, 2], 1):
        save(tmp_path, step, adapter, 2, best=Best("valid/loss", "min", 0.5, best))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000002", "step-00000004", "step-00000005"]
    assert resume(tmp_path / "best", adapter, COMM).state.step == 2
    save(tmp_path, 6, adapter, 2, best=Best("valid/loss", "min", 0.4, 6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000005", "step-00000006"]


def test_the_best_is_kept_where_there_are_no_links(tmp_path, adapter, monkeypatch):
    monkeypatch.setattr(os, "symlink", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    for step in range(1, 6):
        save(tmp_path, step, adapter, 1, best=Best("valid/loss", "min", 0.5, min(step, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]


class Slow:
    """An adapter whose checkpoint is written when it is let, or fails."""

    framework = "numpy"

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error, self.value = threading.Event(), error, 1

    def snapshot(self):
        value = self.value

        def write_it(directory: Path) -> None:
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            (directory / "model.txt").write_text(str(value))

        return write_it


def test_training_goes_on_while_the_copy_is_written_and_the_next_save_waits(tmp_path):
    adapter = Slow()
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    adapter.value = 2  # a step of the training
    assert latest(tmp_path) is None
    threading.Timer(0.2, adapter.go.set).start()
    saver.save(lambda: Content(TrainState(step=2), DATA))
    assert (latest(tmp_path).model / "model.txt").read_text() == "1"
    saver.wait()
    assert (latest(tmp_path).model / "model.txt").read_text() == "2"


def test_an_error_of_the_thread_is_raised_on_all_ranks_by_the_next_collective_call(tmp_path):
    for call in (lambda saver: saver.save(lambda: Content(TrainState(step=2), DATA)), lambda saver: saver.wait()):
        adapter = Slow(OSError(5, "a bad disk"))
        saver = Saver(tmp_path, adapter, COMM, keep=3)
        saver.save(lambda: Content(TrainState(step=1), DATA))
        adapter.go.set()
        saver.close()
        assert saver.failed
        with pytest.raises(HvdtrainError, match=r"step-00000001 could not be written: OSError: .*a bad disk") as caught:
            call(saver)
        assert caught.value.on_all_ranks
        assert not saver.failed


def test_a_file_system_that_is_gone_is_an_error_of_the_write_too(tmp_path, monkeypatch):
    """Looking what is left of the disk fails as the write did."""

    def gone(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    adapter = Slow(OSError(errno.ESTALE, "Stale file handle"))
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    adapter.go.set()
    with pytest.raises(HvdtrainError, match=r"could not be written: OSError: .*Stale"):
        saver.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_in_any_way_is_a_failed_write(tmp_path):
    adapter = Slow(SystemExit(3))
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    adapter.go.set()
    with pytest.raises(HvdtrainError, match="step-00000001 could not be written"):
        saver.wait()


def test_a_defect_keeps_its_traceback(tmp_path, caplog):
    adapter = Slow(ZeroDivisionError("in the writer"))
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    adapter.go.set()
    with pytest.raises(HvdtrainError, match="ZeroDivisionError: in the writer"):
        saver.wait()
    assert "in write_it" in caplog.text  # the function where it was raised
    with pytest.raises(ZeroDivisionError, match="in the loop"):
        saver.save(lambda: (_ for _ in ()).throw(ZeroDivisionError("in the loop")))


def test_closing_while_a_slow_disk_is_written_to_is_no_standstill(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.02)
    adapter = Slow()
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    HERE.enter("training step")
    seen: list[tuple[float, str]] = []

    def look() -> None:
        for _ in range(8):
            time.sleep(0.03)
            seen.append((HERE.moved_at, HERE.phase))
        adapter.go.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    saver.close()
    watcher.join()
    assert len(set(seen)) > 3
    assert seen[-1][1] == "writing the last checkpoint"
    assert HERE.phase == "training step"
    assert latest(tmp_path).state.step == 1


def test_an_error_of_a_write_is_raised_in_the_next_round_too_by_whichever_rank_wrote(tmp_path):
    class Second(LocalCommunicator):
        """Rank 1 of two: the primary has written nothing."""

        def broadcast(self, value, *, name, root=0):
            return None

    adapter = Slow(OSError(5, "a bad disk"))
    saver = Saver(tmp_path, adapter, COMM, keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    adapter.go.set()
    saver.close()
    saver.move(Second(World(rank=1, size=2, source="open mpi")))
    with pytest.raises(HvdtrainError, match="a bad disk"):
        saver.wait()


def test_a_rank_that_is_not_the_primary_copies_and_writes_nothing(tmp_path):
    other = LocalCommunicator(World(rank=1, size=2, source="open mpi"))  # whose primary has nothing to tell
    saver = Saver(tmp_path / "run", None, other, keep=3)
    saver.save(lambda: pytest.fail("called on rank 1"))
    saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_wait_for_a_long_write_meet_again_and_again(tmp_path, monkeypatch):
    """A rank in one collective for as long as the disk takes would count as stalled."""
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.02)
    met: list[str] = []

    class Counting(LocalCommunicator):
        def allreduce(self, values, *, name, op="sum"):
            met.append(name)
            return super().allreduce(values, name=name)

    adapter = Slow()
    saver = Saver(tmp_path, adapter, Counting(World()), keep=3)
    saver.save(lambda: Content(TrainState(step=1), DATA))
    threading.Timer(0.3, adapter.go.set).start()
    saver.wait()
    assert met.count("checkpoint/written") > 5
    assert latest(tmp_path).state.step == 1


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.checkpoint.files import Content, latest
from hvdtrain.checkpoint.writer import Saver
from hvdtrain.state import TrainState
from tests.support.checkpoints import COMM, DATA

run, random = Path({run!r}), random.Random(7)
adapter = LinearAdapter(40_000, 5)
adapter.setup(COMM)

def save_for_ever(first):
    saver = Saver(run, adapter, COMM, keep=2)
    for step in range(first, first + 100_000):
        adapter.weights[:] = adapter.velocity[:] = step
        saver.save(lambda: Content(TrainState(step=step), DATA))

last, broken = 0, 0
for kill in range(50):
    child = os.fork()
    if child == 0:
        save_for_ever(last + 1)
    time.sleep(random.uniform(0.001, 0.08) + (0.2 if kill == 0 else 0))  # the first one must get one done
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    broken += any(run.glob(".part-*"))
    found = latest(run)
    assert found is not None and found.state.step >= last, (kill, found)
    adapter.load(found.model)
    assert (adapter.weights == found.state.step).all() and (adapter.velocity == found.state.step).all()
    last = found.state.step
print(broken, last)
"""


def test_a_writer_killed_at_fifty_random_moments_always_leaves_a_whole_checkpoint(tmp_path):
    code = KILLED.format(root=str(ROOT), run=str(tmp_path / "run"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "damaged" not in result.stderr
    broken, last = map(int, result.stdout.split())
    print(f"50 kills, {broken} of them while a checkpoint was written; the last one of step {last}")
    assert broken > 5


@pytest.mark.skipif("not __import__('os').geteuid() == 0", reason="mounting a small file system needs root")
@pytest.mark.parametrize("framework", ["linear", "torch", "keras"])
def test_a_full_disk_says_so_and_keeps_the_old_checkpoint(tmp_path, framework):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        adapter = getattr(recipes, framework)().adapter
        adapter.setup(COMM)
        adapter.train_step(recipes.arrays(8), lr=None, weight=1.0)
        write(small, Content(TrainState(step=1), DATA), adapter.snapshot(), keep=1)
        free = shutil.disk_usage(small).free
        (small / "filler").write_bytes(b"x" * (free - 4096))
        with pytest.raises(HvdtrainError, match="the disk is full"):
            write(small, Content(TrainState(step=2), DATA), adapter.snapshot(), keep=1)
        assert resume(small, adapter, COMM).state.step == 1
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)
