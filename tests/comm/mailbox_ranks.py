"""``python -m tests.comm.mailbox_ranks OUT``: messages between two ranks, as one of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.comm import Message
from hvdtrain.comm.connect import connect
from hvdtrain.comm.mailbox import Mailbox

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (7, 5), (100_003,), (4, 1024, 1024))
DTYPES = ("float32", "float64", "int64", "uint8", "bool", "float16")


def array(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


def of_all_kinds(mailbox: Mailbox, rank: int) -> None:
    """Both send all, then both receive all: nothing waits for the other to receive."""
    other = 1 - rank
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    mailbox.expect([(other, tag) for tag in range(len(kinds))])
    for tag, (shape, dtype) in enumerate(kinds):
        mailbox.send(Message({"tag": tag, "from": rank}, (array(shape, dtype, tag), array((2,), "float32", tag))), other, tag)
    for tag, (shape, dtype) in enumerate(kinds):
        found = mailbox.receive(other, tag, "a test")
        assert found.about == {"tag": tag, "from": other}
        first, second = found.arrays
        assert (first.shape, first.dtype) == (shape, np.dtype(dtype))
        np.testing.assert_array_equal(first, array(shape, dtype, tag))
        np.testing.assert_array_equal(second, array((2,), "float32", tag))
    mailbox.flush()


def same_tag(mailbox: Mailbox, rank: int) -> None:
    """Messages of one tag, of other shapes each, come in the order in which they were sent."""
    lengths = [5, 9, 4, 200_000, 1]
    if rank == 0:
        for number, length in enumerate(lengths):
            mailbox.send(Message(number, (np.full(length, number, np.float32),)), 1, 3)
    else:
        for number, length in enumerate(lengths):
            found = mailbox.receive(0, 3, "a test")
            assert found.about == number
            np.testing.assert_array_equal(found.arrays[0], np.full(length, number, np.float32))


def large_both_ways(mailbox: Mailbox, rank: int) -> None:
    for step in range(3):
        mine = np.full(4 << 20, rank + 10 * step, np.float32)  # 16 MB
        mailbox.send(Message(None, (mine,)), 1 - rank, step)
        found = mailbox.receive(1 - rank, step, "a test")
        assert (found.arrays[0] == 1 - rank + 10 * step).all()


def while_computing(mailbox: Mailbox, rank: int) -> None:
    """A large message goes on its way while both compute: it is there when it is asked for."""
    if rank == 0:
        mailbox.send(Message(None, (np.ones(4 << 20, np.float32),)), 1, 0)
        time.sleep(1.0)
        mailbox.flush()
    else:
        mailbox.expect([(0, 0)])
        time.sleep(1.0)
        assert mailbox._expected[0][0].is_here
        mailbox.receive(0, 0, "a test")


def main(out: Path) -> None:
    comm = connect(hvdtrain.World.from_env(), "torch")
    inner: Any = comm
    rank = comm.world.rank
    near = comm.mailbox()
    mpi = inner._inner._mpi
    far = Mailbox(mpi.COMM_WORLD.Dup(), mpi, [False, False])
    for mailbox in (near, far):
        for check in (of_all_kinds, same_tag, large_both_ways, while_computing):
            comm.allreduce([0.0], name="together")
            check(mailbox, rank)  # type: ignore[arg-type]
    far.close()
    comm.close()
    (out / f"done-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
