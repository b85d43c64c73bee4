"""Twenty steps of each feature in PyTorch: run on 1, 2 or 3 ranks, the weights must be those of one process.

``python -m tests.exactness.torch_cases OUT`` runs all cases one after another, as one rank of whatever job it is in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.torch
from hvdtrain import lr
from hvdtrain.adapters.torch import TorchAdapter
from hvdtrain.comm.connect import connect
from hvdtrain.config import Options
from hvdtrain.data.sampler import Share
from hvdtrain.trainer import Trainer
from tests.support import recipes
from tests.support.recipes import CLASSES, FEATURES, arrays

STEPS, BATCH, SAMPLES = 20, 61, 307  # every sixth batch is a tail of 2: with 3 ranks one has no sample
WORDS, LENGTH = 40, 7


def mlp(*, norm: bool = False) -> nn.Module:
    layers = [nn.Linear(FEATURES, 33), *([nn.BatchNorm1d(33)] if norm else []), nn.Tanh(), nn.Linear(33, CLASSES)]
    return nn.Sequential(*layers)


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9} | more)


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, *, loss: Any = F.cross_entropy, data: Any = None, **more: Any):
    adapter = TorchAdapter(model, optimizer, loss=loss, update=more.pop("update", None), metrics=more.pop("metrics", None))
    return hvdtrain.Recipe(
        **{"adapter": adapter, "train": data or arrays(SAMPLES), "batch_size": BATCH, "epochs": 99, "seed": 5} | more
    )


def updated(**update: Any) -> hvdtrain.Recipe:
    model = mlp()
    return recipe(model, sgd(model), update=hvdtrain.Update(**update))


def float16_with_overflow() -> hvdtrain.Recipe:
    """The scale of 65,536 is too high for this loss: the first updates are left out."""
    model = mlp()
    return recipe(
        model,
        sgd(model, lr=0.002),
        loss=lambda output, target: 30 * F.cross_entropy(output, target),
        update=hvdtrain.Update(precision="float16"),
    )


def schedule() -> hvdtrain.Recipe:
    model = mlp()
    return recipe(model, sgd(model), lr=lr.warmup(lr.cosine(0.1, STEPS), 5))


def adamw_groups() -> hvdtrain.Recipe:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.002}, {"params": model[2].parameters(), "weight_decay": 0.0}]
    return recipe(model, torch.optim.AdamW(groups, lr=0.004, weight_decay=0.1))


class Words(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 6, sparse=sparse), nn.Linear(6, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(words)))


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Words, and the next words: -100 where there is none. Some sentences have none at all."""
    random = np.random.default_rng(3)
    words = random.integers(0, WORDS, (SAMPLES, LENGTH))
    lengths = random.integers(0, LENGTH + 1, SAMPLES) * (random.random(SAMPLES) > 0.3)
    targets = np.where(np.arange(LENGTH) < lengths[:, None], np.roll(words, -1, axis=1), -100)
    return words, targets


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def tokens(batch_size: int = BATCH, **update: Any) -> hvdtrain.Recipe:
    model = Words()
    counted = hvdtrain.Update(count=lambda target: (target != -100).sum(), **update)
    return recipe(
        model, sgd(model, lr=0.5, weight_decay=0.01), loss=token_loss, data=sentences(), update=counted, batch_size=batch_size
    )


class NormedWords(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.words(words).transpose(1, 2)).transpose(1, 2)))


def normed_tokens() -> hvdtrain.Recipe:
    """Some ranks have samples without any token: no loss, but a part in what is normalised."""
    model = NormedWords()
    update = hvdtrain.Update(count=lambda target: (target != -100).sum(), sync_batch_norm=True)
    return recipe(model, sgd(model, lr=0.1), loss=token_loss, data=sentences(), update=update, batch_size=4)


def class_weights() -> hvdtrain.Recipe:
    model, weights = mlp(), torch.tensor([1.0, 5.0, 0.2, 2.0, 3.0])
    return recipe(
        model,
        sgd(model),
        loss=nn.CrossEntropyLoss(weight=weights),
        update=hvdtrain.Update(count=lambda target: weights[target].sum()),
    )


def first_words() -> tuple[np.ndarray, np.ndarray]:
    words, _ = sentences()
    return words, words[:, ::-1].copy()


def sparse_adam() -> hvdtrain.Recipe:
    model = Words(sparse=True)
    model.head.requires_grad_(False)
    optimizer = torch.optim.SparseAdam(list(model.words.parameters()), lr=0.01)
    return recipe(
        model,
        optimizer,
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        data=first_words(),
        update=hvdtrain.Update(clip_norm=0.05),
        batch_size=4,
    )


class Heads(nn.Module):
    """Two heads, each for the samples that ask for it, and one that nobody asks for: ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.heads = nn.ModuleList([nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, wanted = torch.tanh(self.body(inputs)), (inputs[:, 0] > 1.2).long()
        output = torch.zeros(len(inputs), CLASSES)
        for number, head in enumerate(self.heads):
            if (wanted == number).any():
                output = torch.where((wanted == number)[:, None], head(hidden), output)
        return output


def branches() -> hvdtrain.Recipe:
    model = Heads()
    return recipe(model, sgd(model, weight_decay=0.1), batch_size=5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = (
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, CLASSES),
        )
        self.again.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.first(inputs)))))


def tied_and_frozen() -> hvdtrain.Recipe:
    model = Tied()
    model.again.bias.requires_grad_(False)
    return recipe(model, sgd(model))


def batch_norm() -> hvdtrain.Recipe:
    model = mlp(norm=True)
    return recipe(model, sgd(model), data=arrays(290), update=hvdtrain.Update(sync_batch_norm=True))


def batch_norm_of_two() -> hvdtrain.Recipe:
    """On 3 ranks one has no sample. In float64: two samples of nearly one value are normalised to anything."""
    model, (inputs, targets) = mlp(norm=True).double(), arrays(SAMPLES)
    data = inputs.astype(np.float64), targets
    return recipe(model, sgd(model, lr=0.01), data=data, batch_size=2, update=hvdtrain.Update(sync_batch_norm=True))


def batch_norm_images() -> hvdtrain.Recipe:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )
    return recipe(model, sgd(model), data=arrays(290), update=hvdtrain.Update(sync_batch_norm=True))


def augmented() -> hvdtrain.Recipe:
    from hvdtrain.data.sources import Augmented

    def noisy(sample: Any, random: np.random.Generator) -> Any:
        return sample[0] + random.normal(size=FEATURES).astype(np.float32), sample[1]

    model = mlp()
    return recipe(model, sgd(model), data=Augmented(arrays(SAMPLES), noisy, seed=4))


def unequal_shares() -> hvdtrain.Recipe:
    return batch_norm()


def tiny_batches() -> hvdtrain.Recipe:
    model = mlp()
    return recipe(model, sgd(model, lr=0.02), batch_size=2)


#: feature -> recipe
CASES: dict[str, Callable[[], hvdtrain.Recipe]] = {
    "momentum, weight decay": lambda: recipe(model := mlp(), sgd(model, weight_decay=0.01)),
    "AdamW, parameter groups": adamw_groups,
    "micro-batches": lambda: updated(micro_batch_size=7),
    "clip by global norm": lambda: updated(clip_norm=0.1),
    "clip by value": lambda: updated(clip_value=0.01),
    "micro-batches, clipped": lambda: updated(micro_batch_size=7, clip_norm=0.1),
    "bfloat16": lambda: updated(precision="bfloat16"),
    "float16, overflow": float16_with_overflow,
    "schedule with warm-up": schedule,
    "sparse embedding, SparseAdam": sparse_adam,
    "branches, unused layer": branches,
    "tied and frozen weights": tied_and_frozen,
    "channels last, unfrozen on the way": recipes.torch_unusual,
    "mean over tokens": tokens,
    "mean over tokens, micro-batches": lambda: tokens(micro_batch_size=7),
    "mean over tokens, batches of 2": lambda: tokens(2),
    "mean over tokens, synchronised batch norm": normed_tokens,
    "class weights": class_weights,
    "synchronised batch norm": batch_norm,
    "synchronised batch norm, images": batch_norm_images,
    "synchronised batch norm, batches of 2": batch_norm_of_two,
    "unequal shares": unequal_shares,
    "batches of 2": tiny_batches,
    "augmented samples": augmented,
}


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Any = None,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
    batch_size: int = BATCH,
    accumulate: int = 1,
    clip: float | None = None,
    scale: bool = False,
    count: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sync: bool = False,
) -> list[np.ndarray]:
    """A loop as users write it, with their own clipping and their own scaler."""
    tensors = [torch.as_tensor(array) for array in data or arrays(SAMPLES)]
    loader: Any = DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, num_workers=0)
    model, optimizer, loader = hvdtrain.torch.prepare(
        model, optimizer, loader, accumulate=accumulate, sync_batch_norm=sync, seed=5
    )
    before = _arrays(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scale)
    steps = 0
    while steps < STEPS:
        for number, (inputs, target) in enumerate(loader):
            if number % accumulate == 0:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=scale):
                value = loss(model(inputs), target) / accumulate
            if count is not None:
                hvdtrain.torch.count(optimizer, count(target))
            scaler.scale(value).backward()
            if (number + 1) % accumulate and number + 1 < len(loader):
                continue
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            steps += 1
            if steps == STEPS:
                break
    hvdtrain.torch.check(model, optimizer)
    return before + _arrays(model)


def loop_over_tokens(batch_size: int = 8) -> list[np.ndarray]:
    model = Words(sparse=True)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # a batch of nothing but padding has the loss 0
        return token_loss(output, target) if bool((target != -100).any()) else output.sum() * 0.0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return loop(
        model, optimizer, data=sentences(), loss=loss, count=lambda target: (target != -100).sum(), batch_size=batch_size
    )


def loop_with_norm_of_two() -> list[np.ndarray]:
    model, (inputs, targets) = mlp(norm=True).double(), arrays(SAMPLES)
    return loop(model, sgd(model, lr=0.01), data=(inputs.astype(np.float64), targets), batch_size=2, sync=True)


#: feature -> a user's own loop, which gives the model's state before and after
LOOPS: dict[str, Callable[[], list[np.ndarray]]] = {
    "own loop, clipped": lambda: loop(model := mlp(), sgd(model), clip=0.1),
    "own loop, 4 passes an update": lambda: loop(model := mlp(), sgd(model), accumulate=4),
    "own loop, batches of 2": lambda: loop(model := mlp(), sgd(model, lr=0.02), batch_size=2),
    # From a scale that does not overflow: how many updates do hangs on the samples that a rank's own loss is a mean over.
    "own loop, float16, clipped": lambda: loop(model := mlp(), sgd(model), scale=True, clip=0.5),
    "own loop, mean over tokens": loop_over_tokens,
    "own loop, mean over tokens, batches of 2": lambda: loop_over_tokens(2),
    "own loop, synchronised batch norm": lambda: loop(model := mlp(norm=True), sgd(model), data=arrays(290), sync=True),
    "own loop, synchronised batch norm, batches of 2": loop_with_norm_of_two,
    "own loop, branches": lambda: loop(model := Heads(), sgd(model, weight_decay=0.1), batch_size=5),
}


def reduced(comm: Any, **update: Any) -> float:
    """The gradient that is applied where the mean on rank r is r + 1, and its part of the batch (r + 1) of their sum."""
    model = nn.Linear(1, 1, bias=False)
    adapter = TorchAdapter(
        model, torch.optim.SGD(model.parameters(), 1.0), loss=lambda out, _: out.mean(), update=hvdtrain.Update(**update)
    )
    adapter.setup(comm)
    adapter.sync()
    before, own = model.weight.item(), comm.world.rank + 1
    batch = np.full((own, 1), own, np.float32), np.zeros(own)
    adapter.train_step(batch, lr=None, weight=own / sum(range(comm.world.size + 1)))
    return before - model.weight.item()


def operations(comm: Any) -> None:
    """What each op makes of gradients that are known."""
    size, rank = comm.world.size, comm.world.rank
    means = [own + 1.0 for own in range(size)]
    expected: dict[str, tuple[float, dict[str, Any]]] = {}
    if size > 1:  # first: a Horovod that runs takes no more process sets
        sets = ((0,), tuple(range(1, size)))
        mine = sets[bool(rank)]
        expected["process sets"] = (sum(means[own] for own in mine) / len(mine), {"op": "average", "process_sets": sets})
    expected |= {
        "exact": (sum(mean * mean for mean in means) / sum(means), {}),
        "average": (sum(means) / size, {"op": "average"}),
        "sum": (sum(means), {"op": "sum"}),
        "scaled sum": (3 * sum(means), {"op": "sum", "prescale": 6.0, "postscale": 0.5}),
    }
    if size == 2:  # Adasum(a, b) = (1 - ab / 2a²) a + (1 - ab / 2b²) b
        expected["adasum"] = ((1 - 2 / 2) * 1 + (1 - 2 / 8) * 2, {"op": "adasum"})
    for name, (wanted, update) in expected.items():
        found = reduced(comm, **update)
        assert abs(found - wanted) < 1e-4 * wanted, f"{name} on {size} ranks: {found} instead of {wanted}"


def skipped_updates(comm: Any) -> None:
    """A GradScaler that leaves an update out, without a loader of ours, does not stop the next one; nor do passes given up."""
    model = nn.Linear(3, 2)
    model, optimizer = hvdtrain.torch.prepare(model, sgd(model), accumulate=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    before = model.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(model(torch.ones(4, 3) * (comm.world.rank + 1)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update(None if step else 1024.0)
    assert not torch.equal(before, model.weight)
    hvdtrain.torch.check(model, optimizer)


def steps_now_and_then(comm: Any) -> None:
    """A loop that leaves the last passes of an epoch to the first update of the next one, as one process would do."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    tensors = [torch.as_tensor(array) for array in arrays(50)]
    loader: Any = DataLoader(TensorDataset(*tensors), 10)
    model, optimizer, loader = hvdtrain.torch.prepare(model, sgd(model), loader, accumulate=2)
    for _ in range(2):
        for number, (inputs, target) in enumerate(loader):
            F.cross_entropy(model(inputs), target).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    torch.manual_seed(0)
    plain = nn.Linear(FEATURES, CLASSES)
    optimizer = sgd(plain)
    for _ in range(2):
        for number in range(5):
            part = slice(10 * number, 10 * number + 10)
            F.cross_entropy(plain(tensors[0][part]), tensors[1][part]).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert torch.allclose(plain.weight, model.weight, rtol=1e-5, atol=1e-6), comm.world.rank


class Masked(nn.Module):
    """Buffers of types that Horovod does not carry, and the same names in every instance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.arange(CLASSES) % 2 == 0)
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, self.layer(inputs), 0.0)


def odd_loops(comm: Any) -> None:
    """Two models of the same names on the same batches, a layer frozen on the way, a second step, a second prepare()."""
    results = []
    for prepared in (True, False):
        torch.manual_seed(1)
        models: list[Any] = [Masked(), Masked()]
        optimizers = [sgd(model, weight_decay=0.1) for model in models]
        for _ in range(2):
            loader: Any = DataLoader(TensorDataset(*(torch.as_tensor(array) for array in arrays(50))), 7)
            if prepared:
                hvdtrain.torch.prepare(models[1], optimizers[1])
                loader = hvdtrain.torch.prepare(models[0], optimizers[0], loader)[2]
            for number, (inputs, target) in enumerate(loader):
                for model, optimizer in zip(models, optimizers, strict=True):
                    F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                    if number == 2:
                        optimizer.step()
                    optimizer.zero_grad()
                if number == 3:
                    models[0].layer.bias.requires_grad_(False)
            models[0].layer.bias.requires_grad_(True)
        results.append([parameter.detach() for model in models for parameter in model.parameters()])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def different_batches(comm: Any) -> None:
    """A rank that leaves a batch out, and goes on with the next one, is found."""
    model = nn.Linear(FEATURES, CLASSES)
    loader: Any = DataLoader(TensorDataset(*(torch.as_tensor(array) for array in arrays(50))), 10)
    model, optimizer, loader = hvdtrain.torch.prepare(model, sgd(model), loader)

    def train() -> None:
        for number, (inputs, target) in enumerate(loader):
            if number != comm.world.rank:
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                optimizer.zero_grad()

    if comm.world.size > 1:
        with pytest.raises(hvdtrain.HvdtrainError, match="different batches: with "):
            train()


def local_statistics(comm: Any) -> None:
    """Moving statistics that each rank gathers by itself: averaged by samples, also where a rank has none."""
    model = nn.BatchNorm1d(1, momentum=1.0)
    adapter = TorchAdapter(model, sgd(model, lr=0.0), loss=lambda out, _: out.square().mean())
    adapter.setup(comm)
    adapter.sync()
    own = comm.world.rank * 4  # samples; the first rank has none where there are more
    own = own if comm.world.size > 1 else 4
    values = np.arange(own, dtype=np.float32)[:, None] + comm.world.rank
    whole = sum(rank * 4 for rank in range(comm.world.size)) or 4
    adapter.train_step((values, np.zeros(own)), lr=None, weight=own / whole)
    adapter.settle()
    means = {rank: rank + (rank * 4 - 1) / 2 for rank in range(1, comm.world.size)} or {0: 1.5}
    wanted = sum((rank * 4 or 4) * mean for rank, mean in means.items()) / whole
    assert abs(model.running_mean.item() - wanted) < 1e-5, f"{model.running_mean.item()} instead of {wanted}"


#: every row of the table
NAMES = [*CASES, *LOOPS, "validation figures"]


def figures(comm: Any) -> list[np.ndarray]:
    """Validation figures of every kind, also where some ranks have no sample; and moving statistics that were averaged."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    classification = torchmetrics.classification
    metrics = {
        "accuracy": classification.MulticlassAccuracy(CLASSES, average="micro"),
        "area": classification.MulticlassAUROC(CLASSES, thresholds=None),  # keeps all outputs in lists
        "hits": lambda output, target: hvdtrain.Mean((output.argmax(1) == target).sum(), len(target)),
        "recall": lambda output, target: hvdtrain.Mean(
            ((output.argmax(1) == 1) & (target == 1)).sum(), int((target == 1).sum())
        ),
    }
    for valid in (61, 1):
        made = recipe(model, sgd(model), metrics=metrics, valid=arrays(valid, 8))
        trainer = Trainer(made, comm, options=Options())
        trainer.prepare()
        values = trainer.evaluate()
        if valid == 61:
            found = np.array([values[name] for name in sorted(values)])
    return [np.zeros_like(found), found]


COMPRESSIONS = ("bfloat16", "float16", "topk:0.1", "powersgd:2")


def compressed(compression: str, comm: Any) -> list[np.ndarray]:
    """As the first case, with gradients that travel compressed; what is owed goes into a checkpoint and comes back from it."""
    torch.manual_seed(comm.world.rank)
    made = CASES[NAMES[0]]()
    trainer = Trainer(made, comm, options=Options(max_steps=STEPS, compression=compression))
    trainer.prepare()
    adapter: Any = made.adapter
    before = _arrays(adapter.model)
    trainer.fit()
    after = _arrays(adapter.model)
    adapter.settle(saving=True)
    owed = adapter._state().get("exchange", {})
    assert bool(owed) == (compression != "bfloat16"), owed.keys()
    with tempfile.TemporaryDirectory() as folder:
        adapter.snapshot()(Path(folder))
        adapter.load(Path(folder))
    back = adapter._state().get("exchange", {})
    assert back.keys() == owed.keys()
    assert all(np.array_equal(back[key], owed[key]) for key in owed)
    adapter.setup(comm, trainer.options.exchange_wanted)  # as the next round of an elastic job does
    adapter.sync(root=comm.world.size - 1)
    kept = adapter._state().get("exchange", {})
    assert kept.keys() == owed.keys()
    assert all(np.array_equal(kept[key], owed[key]) for key in owed)
    return before + after


def train(name: str, comm: Any, exchange: Any = "auto") -> list[np.ndarray]:
    """The model's state after 20 steps of a case, after its state before them."""
    torch.manual_seed(comm.world.rank)  # the initial broadcast has to make the ranks equal
    if name == "validation figures":
        return figures(comm)
    if name in LOOPS:
        return LOOPS[name]()
    made = CASES[name]()
    trainer = Trainer(made, comm, options=Options(max_steps=STEPS, exchange=exchange))
    trainer.prepare()
    if name == "unequal shares":
        weights = tuple(range(comm.world.size, 0, -1))
        trainer.place = trainer.place.with_share(Share.weighted(comm.world.rank, weights))
    model = made.adapter.model  # type: ignore[attr-defined]
    before = _arrays(model)
    trainer.fit()
    return before + _arrays(model)


def _arrays(model: nn.Module) -> list[np.ndarray]:
    return [tensor.detach().clone().numpy() for tensor in model.state_dict().values()]


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    comm = connect(hvdtrain.World.from_env(), "torch")
    operations(comm)
    skipped_updates(comm)
    steps_now_and_then(comm)
    odd_loops(comm)
    different_batches(comm)
    local_statistics(comm)
    for name in NAMES:
        np.savez(out / f"{name}-{comm.world.rank}.npz", *train(name, comm))
    for name in CASES if comm.world.size > 1 else ():
        np.savez(out / f"{name} (horovod)-{comm.world.rank}.npz", *train(name, comm, "horovod"))
    for name in COMPRESSIONS if comm.world.size > 1 else ():
        np.savez(out / f"{NAMES[0]} ({name})-{comm.world.rank}.npz", *compressed(name, comm))
    comm.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
