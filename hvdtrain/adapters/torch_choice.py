"""Which exchange a PyTorch model's gradients take, and why; the same on all ranks."""

from __future__ import annotations

import torch

from hvdtrain.adapters import torch_shared as shared
from hvdtrain.adapters.torch_compressed import LINKS, Compressed
from hvdtrain.adapters.torch_exchange import Alone, GradientExchange, sparse_weights
from hvdtrain.adapters.torch_reducer import GradientReducer, HorovodExchange
from hvdtrain.comm import Communicator
from hvdtrain.comm.shared import room
from hvdtrain.compression.choose import parse
from hvdtrain.compression.choose import refusal as no_compression
from hvdtrain.compression.plain import Plain
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, refusal
from hvdtrain.exchange import choose as choose_engine
from hvdtrain.pipeline.part import Group
from hvdtrain.update import Update


def choose(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    update: Update,
    comm: Communicator,
    device: torch.device,
    wanted: Exchange,
    last: Compressed | None,
) -> tuple[GradientExchange, Compressed | None, str]:
    """Collective. What carries the gradients, the carrier of its buckets if that is ours, and why.

    ``last`` is the carrier of the last round of an elastic job: its compressor goes on, with all that it remembers.

    Raises:
        UsageError: they cannot travel as ``wanted``.
    """
    world = comm.world
    if world.size == 1:
        parse(wanted.compression, warmup=wanted.warmup)  # a mistake is one here too
        return Alone(optimizer), last, ""
    plan: shared.Plan | str = "horovod is asked for"
    if wanted.engine != "horovod":
        plan = shared.plan(model, optimizer, update)
    why = plan if isinstance(plan, str) else refusal(
        world, update, wanted, over_mpi=comm.shares_memory, on_host=device.type == "cpu",
        needed=plan.bytes_needed(world.local_size), room=room(),
    )  # fmt: skip
    choice = choose_engine(wanted, comm.allgather(why, name="exchange/refusals"), world)
    if choice.engine == "shared" and isinstance(plan, shared.Plan):
        parts = f"every rank updates all parameters: {plan.whole}" if plan.whole else "each rank updates its share"
        return shared.SharedExchange(plan, optimizer, comm), None, f"shared memory ({choice.reason}); {parts}"
    carrier = _carrier(model, update, comm, device, wanted, last)
    reducer = GradientReducer(model, update, bucket_bytes=int(wanted.bucket_mb * (1 << 20)), carrier=carrier)
    return HorovodExchange(reducer, optimizer), carrier, f"horovod{_packed(carrier, wanted)} ({choice.reason})"


def of_stage(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, update: Update, group: Group, wanted: Exchange
) -> tuple[GradientExchange, str]:
    """Collective. What carries the gradients of a pipeline's stage between those who have the same one, and why.

    Raises:
        UsageError: they cannot travel as ``wanted``.
    """
    if group.peers.world.size == 1:
        parse(wanted.compression, warmup=wanted.warmup)
        return Alone(optimizer), ""
    choice = choose_engine(wanted, ["each stage of a pipeline has a process set of Horovod's"], group.peers.world)
    device = next(model.parameters()).device
    carrier = _carrier(model, update, group.peers, device, wanted, None)
    size = int(wanted.bucket_mb * (1 << 20))
    reducer = GradientReducer(model, update, bucket_bytes=size, carrier=carrier, sets=group.sets)
    return HorovodExchange(reducer, optimizer), f"horovod{_packed(carrier, wanted)} ({choice.reason})"


def _packed(carrier: Compressed | None, wanted: Exchange) -> str:
    return f", {'over MPI' if wanted.compression == 'none' else wanted.compression}" if carrier else ""


def _carrier(
    model: torch.nn.Module,
    update: Update,
    comm: Communicator,
    device: torch.device,
    wanted: Exchange,
    last: Compressed | None,
) -> Compressed | None:
    """Collective. Ours, where gradients travel compressed or faster than through Horovod; else None."""
    compressor = parse(wanted.compression, warmup=wanted.warmup)
    # Between hosts, sums over MPI flow faster around our own ring than through Horovod.
    over_mpi = comm.world.num_nodes > 1 and comm.shares_memory and device.type == "cpu"
    if compressor is None and not over_mpi:
        return None
    why = no_compression(
        compressor.name if compressor else "plain sums", op=update.op, precision=update.precision,
        process_sets=bool(update.process_sets), sparse=bool(sparse_weights(model)),
    )  # fmt: skip
    if not why and any(each.dtype != torch.float32 for each in model.parameters() if each.requires_grad):
        why = "compressors take float32, and the model has other parameters"
    if why and compressor is None:
        return None
    if why:
        raise UsageError(f"--compression {wanted.compression} is not possible: {why}", "leave --compression out").everywhere()
    compressor = compressor or Plain()
    if last is not None and last.is_over and last.compressor.name == compressor.name:
        compressor = last.compressor
    # Horovod, over which a link is elsewhere, has one thread for all of them.
    return Compressed(compressor, *(comm.link() for _ in range(LINKS if comm.shares_memory else 1)))
