"""Memory that ranks share: between real processes, over a mapped file in place of MPI's window."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.comm import Segment
from hvdtrain.comm.shared import Field, HostMemory, HostSum, room, share
from hvdtrain.errors import HvdtrainError

FIELDS = [Field(3, np.float64), Field(1000), Field(5, np.int64, once=True)]


class Mapped:
    """A file that all ranks map, each at its part."""

    def __init__(self, path: Path, rank: int, size: int, nbytes: int = 1 << 16) -> None:
        with open(path, "a+b") as file:
            file.truncate(size * nbytes)
            self._whole = memoryview(mmap.mmap(file.fileno(), size * nbytes))
        self.parts = [self._whole[place * nbytes : (place + 1) * nbytes] for place in range(size)]
        self.rank, self.ranks = rank, list(range(size))

    def fence(self) -> None:
        pass

    def free(self) -> None:
        pass


def memory(path: Path, rank: int, size: int, fields: Sequence[Field] = FIELDS) -> HostMemory:
    def make(nbytes: int) -> Segment:
        return Mapped(path, rank, size)

    return HostMemory(make, rank, fields)


def together(size: int, body: Callable[[int], None]) -> None:
    """``body`` of each rank, in threads."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def test_what_a_rank_writes_before_a_meeting_is_read_after_it(tmp_path):
    def body(rank: int) -> None:
        mine = memory(tmp_path / "memory", rank, 3)
        rows, _, common = mine.arrays
        for step in range(300):
            rows[rank][:] = step * 10 + rank
            mine.meet("the rows with")
            assert [row[0] for row in rows] == [step * 10 + other for other in range(3)]
            if rank == step % 3:
                common[:] = step
            mine.meet("the common array with")
            assert (common == step).all()

    together(3, body)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_adds_up_its_share_in_the_order_of_the_ranks(tmp_path, size, spread):
    values = np.random.default_rng(0).normal(size=(size, 1000)).astype(np.float32)
    wanted = values[0].copy()
    for value in values[1:]:
        wanted += value
    squares = np.zeros(size)

    def body(rank: int) -> None:
        mine = memory(tmp_path / "memory", rank, size)
        flats = mine.arrays[1]
        total = HostSum(mine, flats)
        total.mine[:] = values[rank]
        mine.meet("the values with")
        squares[rank] = total.add_share(spread=spread)
        mine.meet("the sums with")
        found = total.mine if spread else total.sums[total.share]
        np.testing.assert_array_equal(found, wanted if spread else wanted[total.share])

    together(size, body)
    assert squares.sum() == pytest.approx(float((wanted.astype(float) ** 2).sum()), rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_shares_are_the_whole_without_overlap(count, size):
    parts = [share(count, rank, size) for rank in range(size)]
    assert [element for part in parts for element in range(count)[part]] == list(range(count))


def test_a_rank_that_is_gone_is_noticed_by_those_who_wait_for_it(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tests.comm.test_shared import memory\n"
        "memory(Path(sys.argv[1]), 1, 2).meet('a first meeting')"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "memory")], cwd=Path(__file__).parents[2])
    mine = memory(tmp_path / "memory", 0, 2)
    mine.meet("a first meeting")
    with pytest.raises(
        HvdtrainError, match=rf"rank 1 \(process {other.pid}\) has ended.*waits in the exchange of gradients with it"
    ):
        mine.meet("the exchange of gradients with")  # before anybody has waited for the other process: it is a zombie
    other.wait()


def test_room_is_told_where_there_is_such_a_place(tmp_path):
    assert room(tmp_path / "not there") is None
    found = os.statvfs(tmp_path)
    assert room(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)
