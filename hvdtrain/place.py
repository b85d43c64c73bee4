"""What hangs on a rank's place among how many: its recipe, learning rate, part of the data, and what is left to train."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain import lr
from hvdtrain.comm import Communicator
from hvdtrain.config import Options
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.shares import host_shares
from hvdtrain.data.sources import Source, close, on_host
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.recipe import Recipe
from hvdtrain.state import TrainState
from hvdtrain.world import World


@dataclass(frozen=True)
class Place:
    """One rank's, in one round of the ranks."""

    world: World
    options: Options
    #: with what the options override
    recipe: Recipe
    #: the recipe's own batch size, which its learning rate is for
    base_batch_size: int
    #: gives this rank's part of the training data
    loader: Loader
    valid: Source | None = None
    #: of each rank, once the ranks have met
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, train: Source, valid: Source | None, options: Options, world: World) -> Place:
        """The place before the ranks have met: all have the same share.

        Raises:
            UsageError: the options scale a learning rate that the recipe does not give.
        """
        changes = {name: value for name in ("batch_size", "epochs", "seed") if (value := getattr(options, name)) is not None}
        if options.batch_size_per_rank is not None:
            changes["batch_size"] = options.batch_size_per_rank * max(1, world.size // options.pipeline)
        if recipe.lr is None and options.lr_scale != "none":
            raise UsageError(
                f"--lr-scale {options.lr_scale} scales the recipe's lr, and the recipe gives none",
                "give it: Recipe(..., lr=0.1) or lr=hvdtrain.lr.warmup(...)",
            )
        ours = replace(recipe, **changes)
        sampler = Sampler(len(train), ours.batch_size, ours.seed, ours.shuffle)
        loader = Loader(train, sampler, Share.equal(world.rank, world.size))
        return cls(world, options, ours, recipe.batch_size, loader, valid)

    def meet(self, comm: Communicator) -> Place:
        """Collective. The place with the hosts of all ranks, and with this rank's share of what they are to do.

        Raises:
            HvdtrainError: the ranks disagree about the run: they would see other samples, or hang.
        """
        everyone = comm.allgather(self._agreed(), name="setup/agreement")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise HvdtrainError(
                    f"rank {rank} is set up otherwise than rank 0: {_different(theirs, everyone[0])}",
                    "all hosts must have the same recipe, data, options and HVDTRAIN_* variables",
                ).everywhere()
        hosts = tuple(comm.allgather(socket.gethostname(), name="setup/hosts"))
        loader = replace(self.loader, source=on_host(self.loader.source, comm))
        valid = None if self.valid is None else on_host(self.valid, comm)
        met = replace(self, hosts=hosts, loader=loader, valid=valid)
        if self.options.share is None:
            return met
        weights = host_shares(self.options.share, met.hosts, lenient=self.world.elastic)
        return met.with_share(Share.weighted(self.world.rank, weights))

    def on(self, mesh: Mesh) -> Place:
        """The place of a rank that has a stage of the model: all stages of a replica see the same samples.

        Raises:
            UsageError: the options give hosts other shares, and a replica may be on several.
        """
        if mesh.stages == 1:
            return self
        if self.options.share is not None:
            raise UsageError(
                "--share gives hosts parts of a batch, and a pipeline may be on several hosts", "leave --share out"
            )
        replica, _ = mesh.place(self.world.rank)
        return self.with_share(Share.equal(replica, mesh.replicas))

    def with_share(self, share: Share) -> Place:
        """The place with another part of every batch."""
        return replace(self, loader=replace(self.loader, share=share))

    def close(self) -> None:
        """Collective. Give back what the data took when the ranks met."""
        for source in (self.loader.source, self.valid):
            if source is not None:
                close(source)

    @property
    def sampler(self) -> Sampler:
        return self.loader.sampler

    @property
    def validation(self) -> Loader | None:
        """Gives this rank's part of the validation data, in order; None without such data."""
        if self.valid is None:
            return None
        return Loader(self.valid, Sampler(len(self.valid), self.recipe.batch_size, shuffle=False), self.loader.share)

    @property
    def data(self) -> Mapping[str, Any]:
        """What the meaning of an epoch and a position hangs on."""
        return {"samples": self.sampler.num_samples, "seed": self.sampler.seed, "shuffle": self.sampler.shuffle}

    @property
    def lr_factor(self) -> float:
        """On the recipe's learning rate, by the rule of --lr-scale."""
        return lr.scale(self.options.lr_scale, self.recipe.batch_size, self.base_batch_size)

    def lr(self, step: int) -> float | None:
        """The learning rate of the update that follows ``step`` finished ones; None leaves the optimizer's own."""
        rate = self.recipe.lr
        if rate is None:
            return None
        # NumPy's numbers do not belong in checkpoints.
        return float(rate if isinstance(rate, (int, float)) else rate(step)) * self.lr_factor

    def layers_seed(self, step: int) -> int:
        """Of the random layers in one step on this rank."""
        return step_seed(self.recipe.seed, step, self.world.rank)

    def is_over(self, state: TrainState) -> bool:
        """Whether nothing is left to train."""
        return state.step >= self._max_steps or state.epoch >= self.recipe.epochs

    def advance(self, state: TrainState, samples: int) -> TrainState:
        """The state after one more step on ``samples`` samples."""
        after = state.after(samples)
        return after.next_epoch() if after.position >= self.sampler.num_samples else after

    def total_steps(self, state: TrainState) -> int:
        """Steps at the end of the run, as it looks from ``state``."""
        left = 0
        if state.epoch < self.recipe.epochs:
            this_epoch = -(-(self.sampler.num_samples - state.position) // self.sampler.batch_size)
            left = this_epoch + (self.recipe.epochs - state.epoch - 1) * self.sampler.steps_per_epoch
        return max(state.step, min(state.step + left, self._max_steps))

    @property
    def _max_steps(self) -> int:
        return self.options.max_steps or sys.maxsize

    def _agreed(self) -> dict[str, Any]:
        return {
            **self.data,
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "first lr": self.lr(0),
            "valid samples": 0 if self.valid is None else len(self.valid),
            "options": repr(replace(self.options, run_dir=None)),
        }


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of the random layers of one step on one rank: 63 bits, another for each step and rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8, person=b"hvdtrain-layers").digest()
    return int.from_bytes(digest, "little") >> 1


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return ", ".join(f"{name} {first.get(name)} instead of {second.get(name)}" for name in names)
