"""Links between ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class ThreadLink:
    """One rank's end. ``sent`` counts the bytes that a ring, or direct exchange, would send from here."""

    def __init__(self, rank: int, barrier: Barrier, table: list[Any]) -> None:
        self.size, self.rank = len(table), rank
        self.levels: tuple[ThreadLink, ThreadLink | None] | None = None
        self.sent = 0.0
        self._barrier, self._table = barrier, table

    def sum(self, array: NDArray[np.float32]) -> None:
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        everyone = self._all(array)
        array[...] = everyone[0]
        for other in everyone[1:]:
            array += other
        self.sent += 2 * (self.size - 1) / self.size * array.nbytes

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        assert len(parts) == self.size
        self.sent += (self.size - 1) / self.size * parts.nbytes
        return np.stack([other[self.rank] for other in self._all(parts)])

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        self.sent += (self.size - 1) * array.nbytes
        return np.stack(self._all(array))

    def give_up(self) -> None:
        """Let the others fail instead of waiting for this one."""
        self._barrier.abort()
        for link in filter(None, self.levels or ()):
            link.give_up()

    def _all(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        self._table[self.rank] = array.copy()
        self._barrier.wait(20)
        everyone = list(self._table)
        self._barrier.wait(20)
        return everyone


def links(size: int) -> list[ThreadLink]:
    barrier, table = Barrier(size), [None] * size
    return [ThreadLink(rank, barrier, table) for rank in range(size)]


def links_of_hosts(hosts: Sequence[int]) -> list[ThreadLink]:
    """Of hosts with so many ranks each."""
    everyone = links(sum(hosts))
    rest = iter(everyone)
    for leader, ranks in zip(links(len(hosts)), hosts, strict=True):
        for local in links(ranks):
            next(rest).levels = local, leader if local.rank == 0 else None
    return everyone


def on_ranks(size: int, work: Callable[[ThreadLink], T]) -> list[T]:
    """What ``work`` returns on each of ``size`` ranks."""
    return on_links(links(size), work)


def on_links(everyone: Sequence[ThreadLink], work: Callable[[ThreadLink], T]) -> list[T]:
    def run(link: ThreadLink) -> T:
        try:
            return work(link)
        except BaseException:
            link.give_up()
            raise

    with ThreadPoolExecutor(len(everyone)) as pool:
        return [done.result() for done in [pool.submit(run, link) for link in everyone]]
