"""How gradients will travel, as far as that can be known before there are ranks: the recipe is not loaded here."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.errors import UsageError
from hvdtrain.exchange import Choice, Exchange, choose, refusal
from hvdtrain.launch import Controller, Host
from hvdtrain.update import Update
from hvdtrain.world import World


def choice(wanted: Exchange, hosts: Sequence[Host], controller: Controller, *, elastic: bool) -> Choice | None:
    """For a recipe whose model is in host memory, which has room for it, and whose update leaves both ways open.

    None for one rank, which exchanges nothing.

    Raises:
        UsageError: "shared" is asked for, and whatever the recipe is, it cannot be. Several names may be those of one machine,
            which only the ranks know: what could be there is not refused.
    """
    size = sum(host.slots for host in hosts)
    if size == 1:
        return None
    worlds = [
        World(size=size, local_size=host.slots, num_nodes=len(hosts), elastic=elastic)
        for host in hosts
        for _ in range(host.slots)
    ]

    def why(world: World) -> str:
        return refusal(world, Update(), wanted, over_mpi=controller == "mpi", on_host=True, needed=0, room=None)

    try:
        return choose(wanted, [why(world) for world in worlds], worlds[0])
    except UsageError as error:
        if not why(World(size=size, local_size=size, num_nodes=1, elastic=elastic)):
            return Choice("shared", "asked for, and the ranks will know who shares memory")
        raise UsageError(error.message, error.hint) from None


def text(found: Choice | None) -> str:
    """A sentence for people."""
    if found is None:
        return "exchange of gradients: none, it is one rank"
    if found.engine == "horovod":
        return f"exchange of gradients: horovod ({found.reason})"
    return (
        f"exchange of gradients: shared memory ({found.reason}), if the model is in host memory, fits into /dev/shm with the copies "
        "that it needs there, and its adapter and update allow it; else horovod. The ranks say which, and why"
    )
