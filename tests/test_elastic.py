"""What people are told when an elastic job goes on; the rounds themselves are in tests/ranks."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from hvdtrain.elastic import Change
from hvdtrain.horovod import start


@pytest.mark.parametrize(
    ("gone", "joined", "text"),
    [
        (("rank 2 on node2",), (), "rank 2 on node2 is gone; 2 ranks go on at step 412 (after 0.0 s)"),
        (("rank 1 on a", "rank 2 on b"), (), "rank 1 on a, rank 2 on b are gone; 2 ranks go on at step 412 (after 0.0 s)"),
        (
            ("rank 0 on a",),
            ("rank 1 on c",),
            "rank 0 on a is gone; rank 1 on c joined; 2 ranks go on at step 412 (after 0.0 s)",
        ),
        ((), (), "a rank did not answer; all ranks are there again; 2 ranks go on at step 412 (after 0.0 s)"),
    ],
)
def test_a_change_is_one_line(gone: tuple[str, ...], joined: tuple[str, ...], text: str):
    assert Change(gone, joined, "a rank did not answer", time.monotonic()).text(2, 412) == text


def test_an_error_that_only_misses_another_rank_is_told_from_a_rank_s_own():
    shut_down = "Horovod has been shut down. This was caused by an exception on one of the ranks"
    explained = ValueError("this rank waited for the others")
    explained.__cause__ = RuntimeError(shut_down)
    gloo = RuntimeError("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:2446")
    for error in (RuntimeError(shut_down), explained, gloo):
        assert start.lost_peers(error)
    for error in (RuntimeError("shut down"), ValueError("Mismatched shapes"), None):
        assert not start.lost_peers(error)


STANDS_STILL = """
import time
from hvdtrain.progress import HERE
from hvdtrain.rank import Rank, watched
from hvdtrain.world import World

HERE.step = 5
with watched(Rank(World(0, 2, elastic=True)), 0.4, ends=True):
    with HERE.waits("allreduce of layer.weight"):
        time.sleep(1.2)
    print("alive", flush=True)
    time.sleep(30)
"""


def test_a_rank_that_does_not_get_on_ends_and_those_that_wait_for_it_do_not():
    done = subprocess.run([sys.executable, "-c", STANDS_STILL], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (124, "alive\n"), done.stderr
    assert "Warning: rank 0 on" in done.stderr
    assert "waits in allreduce of layer.weight" in done.stderr
