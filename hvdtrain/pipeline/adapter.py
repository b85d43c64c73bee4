"""A model whose layers are on several ranks, to the training loop the same as one that is not."""

from __future__ import annotations

import math
import operator
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hvdtrain.adapters import batch_pair, blame
from hvdtrain.comm import Communicator, Post, agree
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.data.sources import map_leaves
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Means
from hvdtrain.pipeline import files, partition, shown
from hvdtrain.pipeline.execute import Route, run
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.part import Cost, Group, Micro, Mode, Part, Place
from hvdtrain.pipeline.wanted import Pipelining
from hvdtrain.update import Update
from hvdtrain.world import World


class PipelineAdapter:
    """An ``Adapter`` of a model that is split into stages; without ``arrange`` there is one, which is the whole model.

    Args:
        part: what this rank has of it, in its framework.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self.framework: str = part.framework
        refuse(part.update)
        self._mesh: Mesh | None = None
        self._post: Post | None = None
        #: what ``load`` is to read, on the primary
        self._pending: Path | None = None
        #: what the ranks of a replica have written for the next snapshot, on the primary
        self._gathered: Path | None = None

    @property
    def update(self) -> Update:
        return self._part.update

    def alike(self) -> Communicator:
        """The ranks that hold the same tensors as this one."""
        return self._group.peers

    def arrange(self, comm: Communicator, wanted: Pipelining, sample: Callable[[Mesh], Any]) -> tuple[Mesh, str]:
        """Collective. Split the model, and make this rank's part of it. Before ``setup``.

        Args:
            sample: gives a replica's batch, to measure layers on.

        Returns:
            who has which part, and how the model was split, as text.

        Raises:
            UsageError: these ranks cannot be stages, or the model cannot be split so.
        """
        world = comm.world
        if world.elastic:  # nothing takes back what a step that is interrupted has changed, on one stage either
            raise UsageError(
                "the ranks of an elastic job may come and go, which the layers of a pipeline do not follow",
                "run without --min-np, or give the recipe a TorchAdapter or KerasAdapter",
            ).everywhere()
        if wanted.stages > 1 and not comm.shares_memory:
            raise UsageError(
                "a pipeline needs MPI, over which stages send activations, and the ranks meet over "
                f"{'nothing: there is one' if world.size == 1 else 'Gloo'}",
                f"hvdtrain run -np {wanted.stages} ..., without --gloo",
            ).everywhere()
        if wanted.micro_batches is not None and self.update.micro_batch_size is not None:
            raise UsageError(
                f"--micro-batches {wanted.micro_batches} and the recipe's micro_batch_size={self.update.micro_batch_size}",
                "leave one of them out",
            ).everywhere()
        self._wanted, self._comm = wanted, comm
        mesh = self._mesh = Mesh.over(comm.allgather(world.node_rank, name="pipeline/nodes"), wanted.stages)
        replica, self._stage = mesh.place(world.rank)
        if wanted.stages == 1:
            self._group = Group(comm, (), LocalCommunicator(World()))
        else:
            self._group = Group(comm.split(self._stage, replica), mesh.sets, comm.split(replica, self._stage))
        costs, bounds, seed = agree(comm, lambda: self._split(lambda: sample(mesh)), name="pipeline/split")
        numbers = range(self._stage, wanted.stages * wanted.virtual_stages, wanted.stages)
        self._part.build(
            Place(
                chunks=tuple((bounds[number], bounds[number + 1]) for number in numbers),
                is_first=self._stage == 0,
                is_last=self._stage == wanted.stages - 1,
                seed=seed,
            )
        )
        self._route = Route(mesh.pipeline(world.rank), self._stage, wanted.virtual_stages)
        if wanted.stages > 1:
            self._post = comm.mailbox()
        return mesh, shown.text(mesh, wanted, costs, bounds)

    def setup(self, comm: Communicator, exchange: Exchange = Exchange()) -> str:  # noqa: B008 - a frozen value
        if self._mesh is None:
            self.arrange(comm, Pipelining(), lambda mesh: None)
        told = self._part.connect(self._group, exchange)
        mine = {name: f"{array.dtype} {tuple(array.shape)}" for name, array in self._part.tensors()}
        self._names = {
            name: facts for theirs in self._group.line.allgather(mine, name="pipeline/names") for name, facts in theirs.items()
        }
        return told

    def sync(self, root: int = 0) -> None:
        directory = files.spread(self._pending, self._comm)
        self._pending = None
        if directory is not None:
            self._part.load(directory)
            shutil.rmtree(directory)
        self._part.share()

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        return self._part.tensors()

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        micros = self._micros(batch, self.update.factor(weight, 1))
        self._pass(micros, Mode(training=True, recompute=self._wanted.recompute), lr, seed)
        squares, units = self._part.reduce()
        # Every stage applies the update, or none does; and by the same factor.
        squares, units = self._group.line.allreduce([squares, units], name="pipeline/norm").tolist()
        factor = self.update.postscale
        if self.update.count is not None:
            factor *= 1.0 / units if units else 1.0
        norm = factor * math.sqrt(squares) if math.isfinite(squares) else math.nan
        if not math.isfinite(norm):
            self._blame(micros, lr, seed)
        if self.update.clip_norm is not None:
            factor *= min(1.0, self.update.clip_norm / (norm + 1e-6))
        self._part.apply(factor)
        return self._part.means()

    def settle(self, *, saving: bool = False) -> None:
        self._part.settle()
        if saving and self._wanted.stages > 1:
            self._gather()

    def eval_step(self, batch: Any) -> Means:
        self._pass(self._micros(batch, 1.0), Mode(training=False))
        return self._part.means()

    def eval_end(self) -> Mapping[str, float]:
        values: Mapping[str, float] = self._part.metric_values() if self._stage == self._wanted.stages - 1 else {}
        found: Mapping[str, float] = self._group.line.broadcast(values, name="pipeline/metrics", root=self._wanted.stages - 1)
        return found

    def snapshot(self) -> Callable[[Path], None]:
        if self._wanted.stages == 1:
            part = self._part.snapshot()
            return lambda directory: part(directory, 0, 1)
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise HvdtrainError("a pipeline's snapshot follows settle(saving=True), which gathers the stages' parts")

        def write(directory: Path) -> None:
            for file in sorted(gathered.iterdir()):
                shutil.move(file, directory / file.name)
            gathered.rmdir()

        return write

    def load(self, directory: Path) -> None:
        self._part.check(directory, self._names)
        if self._comm.world.size == 1:
            self._part.load(directory)
        else:  # until the others can have it, too
            self._pending = directory

    def _split(self, sample: Callable[[], Any]) -> tuple[list[Cost], tuple[int, ...], int]:
        """What the layers take, where the parts begin and end, and the seed of the weights: the primary's."""
        wanted = self._wanted
        parts = wanted.stages * wanted.virtual_stages
        measured = wanted.split in ("time", "memory") and parts > 1
        costs = self._part.costs(self._micro_batch(sample()) if measured else None, measured=measured)
        if wanted.by_hand:
            bounds = partition.by_hand(wanted.split, len(costs), parts)
        else:
            bounds = partition.assign([wanted.weight(cost) for cost in costs], wanted.stages, wanted.virtual_stages)
        return costs, bounds, self._part.seed()

    def _micro_batch(self, batch: Any) -> Any:
        micros = self._micros(batch, 1.0)
        return micros[0].inputs, micros[0].targets

    def _micros(self, batch: Any, factor: float) -> list[Micro]:
        inputs, targets, count = batch_pair(batch)
        pieces = self._wanted.micros(count, self.update.micro_batch_size)
        return [
            Micro(
                map_leaves(operator.itemgetter(piece), inputs),
                map_leaves(operator.itemgetter(piece), targets),
                piece.stop - piece.start,
                factor * (piece.stop - piece.start) / count,
            )
            for piece in pieces
        ]

    def _pass(self, micros: list[Micro], mode: Mode, lr: float | None = None, seed: int | None = None) -> None:
        """Collective over the pipeline. All micro-batches through all stages."""
        self._part.begin(micros, mode, lr=lr, seed=seed)
        run(self._part, self._wanted.schedule if mode.training else "forward", len(micros), self._route, self._post)

    def _blame(self, micros: list[Micro], lr: float | None, seed: int | None) -> None:
        """Collective. Raise the error that names the rank and the tensor whose own gradient is not finite."""
        self._pass(micros, Mode(training=True, reducing=False), lr, seed)
        means = self._part.means()
        loss = means["loss"].value if means["loss"].count else None
        blame(self._part.not_finite(), loss, socket.gethostname(), self._comm)

    def _gather(self) -> None:
        """Collective. The parts of the first replica, in a directory of the primary's, for the next snapshot."""
        assert self._mesh is not None
        owners = self._mesh.ranks[0]
        mine = tempfile.mkdtemp(prefix="hvdtrain-part-") if self._comm.world.rank in owners else None
        if mine is not None:
            self._part.snapshot()(Path(mine), self._stage, len(owners))
        if self._gathered is not None:
            shutil.rmtree(self._gathered, ignore_errors=True)
        self._gathered = files.gather(None if mine is None else Path(mine), owners, self._comm, self._post)


def refuse(update: Update) -> None:
    """Raise UsageError for an update that stages cannot do together."""
    problems = [
        f"{text}: {why}"
        for found, text, why in (
            (update.op != "exact", f"op={update.op!r}", "stages average exactly"),
            (
                update.precision == "float16",
                "precision='float16'",
                "the scale of the loss is not shared between stages; use bfloat16",
            ),
            (update.sync_batch_norm, "sync_batch_norm", "micro-batches go through a stage one after the other"),
            (bool(update.process_sets), "process_sets", "the pipeline makes its own"),
        )
        if found
    ]
    if problems:
        raise UsageError(f"a pipeline cannot have {'; '.join(problems)}", "leave it out of Update(...)")
