"""Which ranks have which stage of which copy of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Mesh:
    """Every replica is a pipeline of ``stages`` ranks; ranks that have the same stage of different replicas are peers."""

    stages: int
    #: ranks[replica][stage]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, hosts: Sequence[Hashable], stages: int) -> Mesh:
        """The layout in which the fewest pipelines leave their host.

        Each host gets as many whole pipelines as it has ranks for, in order; the ranks that are left, host by host, make up the
        others. Replicas are in order of their first ranks, so the primary has the first stage of the first.

        Args:
            hosts: what tells the node of each rank from others.

        Raises:
            UsageError: the ranks cannot be divided into pipelines.
        """
        size = len(hosts)
        if stages < 1:
            raise UsageError(f"a pipeline of {stages} stages", "use --pipeline 1 or more").everywhere()
        if size % stages or not size:
            fewer = size // stages * stages
            raise UsageError(
                f"{size} rank{'' if size == 1 else 's'} cannot be divided into pipelines of {stages} stages",
                f"use {f'-np {fewer} or ' if fewer else ''}-np {fewer + stages}, or other --pipeline",
            ).everywhere()
        on_host: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            on_host.setdefault(host, []).append(rank)
        whole = {host: len(ranks) // stages * stages for host, ranks in on_host.items()}
        order = [rank for host, ranks in on_host.items() for rank in ranks[: whole[host]]]
        order += [rank for host, ranks in on_host.items() for rank in ranks[whole[host] :]]
        return cls(stages, tuple(sorted(tuple(order[begin : begin + stages]) for begin in range(0, size, stages))))

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the ranks that have it, in order of replicas."""
        return tuple(zip(*self.ranks, strict=True))

    def place(self, rank: int) -> tuple[int, int]:
        """The replica and the stage of ``rank``."""
        return self._places[rank]

    def pipeline(self, rank: int) -> tuple[int, ...]:
        """The ranks of the replica that ``rank`` belongs to, in order of stages."""
        return self.ranks[self.place(rank)[0]]

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the stage of ``rank``, in order of replicas, with itself."""
        return self.sets[self.place(rank)[1]]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (replica, stage) for replica, ranks in enumerate(self.ranks) for stage, rank in enumerate(ranks)}
