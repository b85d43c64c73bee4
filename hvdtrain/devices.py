"""The GPU of a rank. Before a framework is imported."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from hvdtrain.launch import resources
from hvdtrain.world import World

log = logging.getLogger(__name__)


def pin_device(world: World, environ: MutableMapping[str, str]) -> None:
    """Show this rank its own GPU alone, by its local rank among those that CUDA_VISIBLE_DEVICES allows.

    Before a framework is imported: one that sees all of a host's GPUs takes memory on each of them.
    """
    devices = resources.gpus(environ)
    if not devices or world.size == 1 or resources.gpus_are_bound(environ):
        return
    if world.local_rank >= len(devices):
        log.warning("rank %d shares a GPU: local rank %d, %d GPUs here", world.rank, world.local_rank, len(devices))
    environ["CUDA_VISIBLE_DEVICES"] = devices[world.local_rank % len(devices)]
