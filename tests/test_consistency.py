"""Ranks that hold other tensors, or other values, are told apart by name."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest

from hvdtrain.consistency import alike, check_shapes, check_values
from hvdtrain.errors import HvdtrainError

HOSTS = ("node1", "node1", "node2")


class ThreadComm:
    """Ranks that are threads of this process: as much of a communicator as is needed here."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = Barrier(size), [None] * size

    def of(self, rank: int) -> Any:
        outer = self

        class Comm:
            def allgather(self, value: Any, *, name: str) -> list[Any]:
                outer.values[rank] = value
                outer.barrier.wait(10)
                result = list(outer.values)
                outer.barrier.wait(10)
                return result

            def allreduce(self, values: Any, *, name: str, op: str) -> Any:
                assert op == "max"
                return np.max(self.allgather(values, name=name), axis=0)

        return Comm()


def on_ranks(check: Callable[..., None], tensors: list[dict[str, np.ndarray]]) -> list[str]:
    """What each rank raised."""
    comm, messages = ThreadComm(len(tensors)), [""] * len(tensors)

    def run(rank: int) -> None:
        try:
            check(tensors[rank].items(), comm.of(rank), HOSTS)
        except HvdtrainError as error:
            messages[rank] = error.message if error.on_all_ranks else "told on one rank only"

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return messages


@pytest.mark.parametrize("digest", [0, 1, 2**32 - 1])
def test_digests_of_32_bits_are_told_apart_by_their_last_bit(digest):
    def said(*digests: int) -> list[bool]:
        class Comm:
            def allreduce(self, values: Any, *, name: str, op: str) -> Any:
                assert op == "max"
                return np.max([np.array((each, -each), dtype=np.float64) for each in digests], axis=0)

        return [alike(each, Comm(), name="x") for each in digests]

    assert said(digest, digest, digest) == [True] * 3
    assert said(digest, digest ^ 1, digest) == [False] * 3


def model(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"model/a": np.arange(6.0).reshape(2, 3), "model/b": np.zeros(3, np.float32)} | changes


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (model(), ""),
        (
            model(**{"model/b": np.zeros(4, np.float32)}),
            "its tensor 1 is 'model/b float32 (4,)', that of rank 0 is 'model/b float32 (3,)'",
        ),
        (model(**{"model/b": np.zeros(3)}), "its tensor 1 is 'model/b float64 (3,)'"),
        (dict(reversed(model().items())), "its tensor 0 is 'model/b float32 (3,)', that of rank 0 is 'model/a float64 (2, 3)'"),
        (model(**{"model/c": np.zeros(1)}), "it has 3 tensors, rank 0 has 2"),
    ],
)
def test_another_model_is_told_by_rank_host_and_tensor(odd, message):
    for said in on_ranks(check_shapes, [model(), model(), odd]):
        assert message in said
        assert bool(said) == bool(message)
        assert not said or said.startswith("rank 2 on node2 has another model or optimizer than rank 0")


def test_the_rank_that_differs_is_the_one_not_like_the_others():
    changed = model(**{"model/b": np.array([0, 1e-7, 0], np.float32)})
    for rank in range(3):
        tensors = [changed if each == rank else model() for each in range(3)]
        for said in on_ranks(check_values, tensors):
            assert said == f"the ranks have drifted apart: rank {rank} on {HOSTS[rank]} differs in model/b"


def test_the_same_values_pass_and_so_do_nans_and_empty_tensors():
    odd = model(**{"model/n": np.array([np.nan]), "model/e": np.zeros((0, 3)), "model/0": np.array(1.0)})
    assert on_ranks(check_values, [odd, dict(odd), dict(odd)]) == [""] * 3
