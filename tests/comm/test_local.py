"""A single process needs no other: every collective gives what was put in."""

from __future__ import annotations

import typing

import numpy as np
import pytest

from hvdtrain.comm import Communicator, Op
from hvdtrain.comm.connect import connect
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import UsageError
from hvdtrain.world import World

COMM: Communicator = LocalCommunicator(World())


@pytest.mark.parametrize("op", typing.get_args(Op))
def test_a_reduction_over_one_rank_is_its_own_value(op: Op) -> None:
    reduced = COMM.allreduce([1, 2.5], name="x", op=op)
    assert (reduced.tolist(), reduced.dtype) == ([1.0, 2.5], np.float64)
    assert COMM.allreduce([], name="x", op=op).shape == (0,)


def test_a_reduction_leaves_its_input_alone() -> None:
    values = np.array([1.0, 2.0])
    COMM.allreduce(values, name="x")[:] = 0
    assert values.tolist() == [1.0, 2.0]


def test_values_come_back_as_they_were() -> None:
    value = {"step": 3}
    assert COMM.broadcast(value, name="x") is value
    assert COMM.allgather(value, name="x") == [value]


def test_nothing_waits_or_ends_the_process() -> None:
    COMM.abort(3)
    COMM.close()
    assert COMM.allgather(1, name="x") == [1]


def test_one_process_connects_without_mpi_or_horovod() -> None:
    world = World(source="pmi")
    comm = connect(world, "numpy")
    assert isinstance(comm, LocalCommunicator)
    assert comm.world is world


def test_ranks_of_torchrun_are_told_which_launcher_to_use() -> None:
    with pytest.raises(UsageError, match="torchrun started these ranks") as error:
        connect(World(1, 4, source="torchrun"), "torch")
    assert error.value.hint.startswith("use: hvdtrain run -np 4")
