"""Whether all ranks hold the same: compared by small digests, and told by the name of the tensor and of the rank."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Communicator
from hvdtrain.errors import HvdtrainError

#: tensors by name, in the order in which they are reduced
Tensors = Iterable[tuple[str, NDArray[Any]]]


def alike(digest: int, comm: Communicator, *, name: str) -> bool:
    """Collective. Whether all ranks bring the same ``digest`` of 32 bits.

    The largest of it and of its negative tell the largest and the smallest of all: two numbers, whatever the number of ranks.
    """
    largest, smallest = comm.allreduce((digest, -digest), name=name, op="max").tolist()
    return bool(largest == -smallest)


def check_shapes(tensors: Tensors, comm: Communicator, hosts: tuple[str, ...], ranks: Sequence[int] = ()) -> None:
    """Collective. Raise HvdtrainError if the ranks have other tensors: names, order, shapes or dtypes.

    ``hosts`` of all ranks; ``ranks`` are those of ``comm``, if it does not have all.
    """
    mine = [f"{name} {array.dtype} {tuple(array.shape)}" for name, array in tensors]
    if alike(zlib.crc32("\n".join(mine).encode()), comm, name="setup/model"):
        return
    everyone = comm.allgather(mine, name="setup/tensors")
    first = f"rank {ranks[0] if ranks else 0}"
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            place = next((i for i, pair in enumerate(zip(theirs, everyone[0], strict=False)) if pair[0] != pair[1]), None)
            if place is None:
                found = f"it has {len(theirs)} tensors, {first} has {len(everyone[0])}"
            else:
                found = f"its tensor {place} is '{theirs[place]}', that of {first} is '{everyone[0][place]}'"
            raise HvdtrainError(
                f"{_who(rank, hosts, ranks)} has another model or optimizer than {first}: {found}",
                "every rank must build the same layers in the same order, from the same settings",
            ).everywhere()


def check_values(tensors: Tensors, comm: Communicator, hosts: tuple[str, ...], ranks: Sequence[int] = ()) -> None:
    """Collective. Raise HvdtrainError if a tensor is not bit for bit the same on all ranks; arguments as before."""
    mine = {name: _digest(array) for name, array in tensors}
    if alike(zlib.crc32(repr(mine).encode()), comm, name="consistency/digest"):
        return
    everyone: list[Mapping[str, int]] = comm.allgather(mine, name="consistency/tensors")
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))  # the same list on every rank
    for name in names:
        digests = [theirs.get(name) for theirs in everyone]
        usual = Counter(digests).most_common(1)[0][0]
        if odd := [rank for rank, digest in enumerate(digests) if digest != usual]:
            more = sum(len({theirs.get(other) for theirs in everyone}) > 1 for other in names) - 1
            also = f", and {more} more tensors" if more else ""
            raise HvdtrainError(
                f"the ranks have drifted apart: {_who(odd[0], hosts, ranks)} differs in {name}{also}",
                "something changed the model on one rank only (code under `if rank == 0`, memory errors); "
                "go on from the last checkpoint: --resume auto",
            ).everywhere()


def _who(rank: int, hosts: tuple[str, ...], ranks: Sequence[int]) -> str:
    rank = ranks[rank] if ranks else rank
    return f"rank {rank} on {hosts[rank]}" if len(hosts) > rank else f"rank {rank}"


def _digest(array: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data) if array.size else 0
