"""What can carry a sum over ranks: plain MPI, Horovod, Gloo, memory that is shared."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Communicator
from hvdtrain.comm.buffers import Buffers
from hvdtrain.comm.shared import Field, HostMemory, HostSum, bytes_needed, room
from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import require, start


@dataclass(frozen=True)
class Buffer:
    """An array of this rank's and how to sum it over all ranks."""

    #: what this rank brings
    array: NDArray[np.float32]
    #: Collective. The sum: ``array`` itself, or for carriers that cannot work in place another one.
    reduce: Callable[[], NDArray[np.float32]]
    #: Collective.
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Carrier:
    about: str
    #: Collective. A buffer of so many elements.
    buffer: Callable[[int], Buffer]
    #: Collective.
    close: Callable[[], None]


@dataclass(frozen=True)
class Kind:
    #: why this rank cannot take part; empty if it can. The number: bytes of the largest array.
    missing: Callable[[Communicator, int], str]
    #: Collective.
    open: Callable[[Communicator], Carrier]


def _framework() -> str:
    """Whose tensors Horovod is to carry: "torch", "tensorflow", or none."""
    for name in ("torch", "tensorflow"):
        try:
            require(name)
        except HvdtrainError:
            continue
        return name
    return ""


def _no_mpi(comm: Communicator, size: int) -> str:
    return "" if comm.shares_memory else "the ranks meet over Gloo (leave --gloo out)"


def _mpi(comm: Communicator) -> Carrier:
    buffers = Buffers()

    def buffer(count: int) -> Buffer:
        array = np.zeros(count, np.float32)

        def reduce() -> NDArray[np.float32]:
            buffers.sum(array)
            return array

        return Buffer(array, reduce)

    return Carrier(f"{buffers.library}, MPI_Allreduce in place", buffer, buffers.close)


def _no_horovod(comm: Communicator, size: int) -> str:
    if _framework():
        return ""
    try:
        require("torch")
    except HvdtrainError as error:
        return f"{error.message}: {error.hint}"
    return ""


def _horovod(comm: Communicator) -> Carrier:
    framework = _framework()
    if framework == "torch":
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd

    is_ours = comm.shares_memory  # over Gloo it is the communicator's
    start.init(hvd)

    def buffer(count: int) -> Buffer:
        name = f"bench/{count}"
        if framework == "torch":
            import torch

            tensor = torch.zeros(count)

            def reduce() -> NDArray[np.float32]:
                hvd.allreduce_(tensor, op=hvd.Sum, name=name)
                return array

            array = tensor.numpy()
            return Buffer(array, reduce)
        import tensorflow as tf

        array = np.zeros(count, np.float32)
        given: list[Any] = []

        def reduce_tf() -> NDArray[np.float32]:
            if not given:
                given.append(tf.constant(array))
            total: NDArray[np.float32] = hvd.allreduce(given[0], op=hvd.Sum, name=name).numpy()
            return total

        return Buffer(array, reduce_tf)

    over = "MPI" if comm.shares_memory else "Gloo"
    place = "in place" if framework == "torch" else "into a new tensor"
    return Carrier(f"horovod.{framework} over {over}, allreduce {place}", buffer, hvd.shutdown if is_ours else lambda: None)


def _no_gloo(comm: Communicator, size: int) -> str:
    return "" if importlib.util.find_spec("torch") is not None else "it is torch.distributed's, and PyTorch is not installed"


def _gloo(comm: Communicator) -> Carrier:
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed  # its stubs lack what its documentation has
    host = "127.0.0.1" if comm.world.num_nodes == 1 else socket.gethostname()
    mine = dist.TCPStore(host, 0, comm.world.size, is_master=True, wait_for_workers=False) if comm.world.is_primary else None
    host, port = comm.broadcast((host, mine.port if mine is not None else 0), name="bench/gloo")
    store = mine if mine is not None else dist.TCPStore(host, port, comm.world.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.world.rank, world_size=comm.world.size)

    def buffer(count: int) -> Buffer:
        tensor = torch.zeros(count)
        array = tensor.numpy()

        def reduce() -> NDArray[np.float32]:
            dist.all_reduce(tensor)
            return array

        return Buffer(array, reduce)

    return Carrier(
        f"Gloo of torch {torch.__version__} (what DDP uses), all_reduce in place", buffer, dist.destroy_process_group
    )


def _not_shared(comm: Communicator, size: int) -> str:
    if not comm.shares_memory:
        return "the ranks meet over Gloo, shared memory needs MPI (leave --gloo out)"
    if comm.world.num_nodes > 1:
        return f"the ranks are on {comm.world.num_nodes} hosts"
    needed, free = comm.world.size * bytes_needed([Field(size // 4)], first=False), room()
    if free is not None and needed > 0.9 * free:
        return f"{needed >> 20} MB of shared memory are needed and /dev/shm has {free >> 20} MB free"
    return ""


def _shared(comm: Communicator) -> Carrier:
    def buffer(count: int) -> Buffer:
        memory = HostMemory(comm.share, comm.world.local_rank, [Field(count)])
        summing = HostSum(memory, memory.arrays[0])

        def reduce() -> NDArray[np.float32]:
            memory.meet("the other arrays")
            summing.add_share(spread=True, squared=False)
            memory.meet("the other sums")
            return summing.mine

        return Buffer(summing.mine, reduce, memory.close)

    return Carrier("arrays in an MPI-3 shared window, summed in place (--exchange shared)", buffer, lambda: None)


#: In the order in which they are measured: Horovod's threads run from when it is opened.
KINDS = {
    "mpi": Kind(_no_mpi, _mpi),
    "shared": Kind(_not_shared, _shared),
    "gloo": Kind(_no_gloo, _gloo),
    "horovod": Kind(_no_horovod, _horovod),
}


def usable(comm: Communicator, names: Sequence[str], size: int) -> tuple[list[str], dict[str, str]]:
    """Collective. Those of ``names`` that all ranks have, and why the others are left out."""
    mine = {name: KINDS[name].missing(comm, size) for name in names}
    everyone = comm.allgather(mine, name="bench/carriers")
    why = {name: next((each[name] for each in everyone if each[name]), "") for name in names}
    return [name for name in names if not why[name]], {name: reason for name, reason in why.items() if reason}
