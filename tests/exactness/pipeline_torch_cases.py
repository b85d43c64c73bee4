"""Models as lists of layers, in PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hvdtrain
from examples.torch_gpt import Block, Embedding, loss
from examples.torch_resnet import Residual
from hvdtrain.adapters.torch_layers import Layer
from hvdtrain.adapters.torch_pipeline import TorchPipeline
from tests.support.pipelines import Lengths
from tests.support.recipes import CLASSES, FEATURES, arrays

BATCH, SAMPLES = 61, 307  # every sixth batch is a tail of 2, so that most micro-batches of it are missing


def recipe(layers: Any, optimizer: Any, *, data: Any = None, loss: Any = F.cross_entropy, **more: Any) -> hvdtrain.Recipe:
    adapter = TorchPipeline(layers, optimizer, loss=loss, update=more.pop("update", None))
    return hvdtrain.Recipe(
        **{"adapter": adapter, "train": data or arrays(SAMPLES), "batch_size": BATCH, "epochs": 99, "seed": 5} | more
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.1)


def mlp_layers() -> list[Any]:
    sizes = (FEATURES, 33, 21, 17, 13, 11, CLASSES)
    torch.manual_seed(1)
    return [
        lambda inputs=inputs, outputs=outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
        for inputs, outputs in pairwise(sizes)
    ]


def mlp() -> hvdtrain.Recipe:
    return recipe(mlp_layers(), sgd)


def clipped() -> hvdtrain.Recipe:
    return recipe(mlp_layers(), adam, update=hvdtrain.Update(clip_norm=0.05))


def clipped_value() -> hvdtrain.Recipe:
    return recipe(mlp_layers(), sgd, update=hvdtrain.Update(clip_value=0.002))


def gpt() -> hvdtrain.Recipe:
    """The first and the last layer have the same weights."""
    torch.manual_seed(2)
    letters = np.random.default_rng(0).integers(0, 128, (SAMPLES, 10))
    embedding = Layer(lambda: Embedding(16, 9))
    layers = [
        embedding,
        *[lambda: Block(16, 2) for _ in range(4)],
        lambda: nn.LayerNorm(16),
        embedding.tied(lambda module, x: x @ module.words.T),
    ]
    return recipe(layers, sgd, loss=loss, data=(letters[:, :-1], letters[:, 1:]))


def lengths() -> hvdtrain.Recipe:
    """Sequences of another length in each batch."""
    torch.manual_seed(7)
    return recipe([lambda: Embedding(16, 9), lambda: Block(16, 2), lambda: nn.Linear(16, 128)], sgd, loss=loss, data=Lengths())


def masked() -> hvdtrain.Recipe:
    """The loss is a mean over the letters that are no padding, of which there is another number in each micro-batch."""
    torch.manual_seed(3)
    letters = np.random.default_rng(1).integers(0, 128, (SAMPLES, 10))
    targets = np.where(np.arange(9) < np.random.default_rng(2).integers(1, 10, (SAMPLES, 1)), letters[:, 1:], -100)
    targets[::2] = -100  # some micro-batches of a tail have nothing but padding
    return recipe(
        [lambda: Embedding(16, 9), lambda: Block(16, 2), lambda: nn.Linear(16, 128)],
        sgd,
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100),
        data=(letters[:, :-1], targets),
        update=hvdtrain.Update(count=lambda target: (target != -100).sum()),
    )


def shared_parameter() -> hvdtrain.Recipe:
    """Modules that the recipe has made, two of which have the same parameter."""
    torch.manual_seed(4)
    first, last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    last.weight = first.weight
    return recipe(
        nn.Sequential(first, nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh(), last, nn.Linear(FEATURES, CLASSES)), sgd
    )


def resnet() -> hvdtrain.Recipe:
    torch.manual_seed(5)
    images = np.random.default_rng(3).standard_normal((SAMPLES, 1, 8, 8)).astype(np.float32)
    layers = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), Residual(8, 8), Residual(8, 16, 2), nn.Flatten(), nn.Linear(144, CLASSES)
    )
    return recipe(layers, sgd, data=(images, arrays(SAMPLES)[1]))


class Pair(nn.Module):
    """Takes and gives two tensors, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, pair: Any) -> Any:
        value, mask = (pair["value"], pair["mask"]) if isinstance(pair, dict) else (pair, pair.abs() < 1)
        return {"value": torch.tanh(self.inner(value)) * mask, "mask": mask}


def nested() -> hvdtrain.Recipe:
    torch.manual_seed(6)
    last = Layer(lambda: nn.Linear(FEATURES, CLASSES), lambda module, pair: module(pair["value"]))
    return recipe([Pair, Pair, Pair, last], sgd)


CASES = {
    "mlp": mlp,
    "clipped by norm": clipped,
    "clipped by value": clipped_value,
    "gpt": gpt,
    "lengths": lengths,
    "masked": masked,
    "shared parameter": shared_parameter,
    "resnet": resnet,
    "nested": nested,
}
