"""What a compressor of gradients is, and what it sends them over: values of neither framework, on the host.

A bucket is a flat float32 array that holds the gradients of some parameters, one after the other. A compressor replaces it by
an approximation of its sum over ranks, the same bits on every rank, and sends fewer bytes for it than the sum itself would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
State = dict[str, NDArray[Any]]


class Link(Protocol):
    """Collectives on contiguous host arrays. Blocking; called in the same order on all ranks, from one thread, not always the main one."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This one's, from 0."""

    @property
    def levels(self) -> tuple[Link, Link | None] | None:
        """Where several hosts have several ranks: a link of this host's ranks, and one of the first ranks of all hosts.

        The second is None on ranks that are not their host's first. None: there is only this link.
        """

    def sum(self, array: Floats) -> None:
        """Collective. Replace ``array`` (one shape on all ranks) by its sum over ranks."""

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        """Collective. Send row k of ``parts`` [size, n] to rank k; row k of the result came from rank k."""

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Collective. The arrays of all ranks, of one shape: [size, *shape]."""


class Compressor(Protocol):
    """One way to approximate sums over ranks, with what it remembers from step to step.

    What is not finite in a gradient of any rank is not finite in the sum either, and nothing of it is remembered.
    """

    @property
    def name(self) -> str:
        """As the user writes it: ``topk:0.01``."""

    def exchange(self, key: str, tensors: Sequence[Floats], link: Link) -> None:
        """Collective. Replace the tensors by their sum over ranks.

        Args:
            key: names the bucket; the same in every step and on every rank.
            tensors: views of one flat contiguous bucket, in its order and without gaps, in the parameters' shapes.
        """

    def settle(self, link: Link) -> None:
        """Collective. Give all that ranks still owe to rank 0, whose ``state`` is whole then, whatever the number of ranks."""

    def state(self) -> State:
        """Copies of what is remembered."""

    def load(self, state: Mapping[str, NDArray[Any]], *, primary: bool) -> None:
        """Go on from rank 0's ``state``. All ranks load the same; ``primary``: this one is rank 0, and owes what was owed.

        Or from what ``feedback.handed`` made of the state of any rank.
        """
