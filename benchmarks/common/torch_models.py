"""The models in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import tasks

loss: Callable[[Any, Any], Any] = nn.functional.cross_entropy


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(tasks.WORDS, tasks.WIDTH)
        layer = nn.TransformerEncoderLayer(tasks.WIDTH, tasks.HEADS, 4 * tasks.WIDTH, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, tasks.LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(tasks.WIDTH, tasks.WORDS)

    def forward(self, words: Any) -> Any:
        return self.head(self.layers(self.words(words)).mean(1))


class Lookup(nn.Module):
    """The mean of a sample's rows, and a small perceptron on it. The gradient of the table is dense, as by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(tasks.ROWS, tasks.ROW_WIDTH)
        self.head = nn.Sequential(nn.Linear(tasks.ROW_WIDTH, tasks.HIDDEN), nn.ReLU(), nn.Linear(tasks.HIDDEN, tasks.CLASSES))

    def forward(self, rows: Any) -> Any:
        return self.head(self.rows(rows).mean(1))


def _tiny() -> nn.Module:
    return nn.Sequential(
        nn.Linear(tasks.FEATURES, tasks.HIDDEN),
        nn.ReLU(),
        nn.Linear(tasks.HIDDEN, tasks.HIDDEN),
        nn.ReLU(),
        nn.Linear(tasks.HIDDEN, tasks.CLASSES),
    )


def _conv() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((3, *tasks.CHANNELS), tasks.CHANNELS, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    wide = tasks.CHANNELS[-1] * (tasks.PIXELS >> len(tasks.CHANNELS)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, tasks.CLASSES))


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of the task ``name`` and its optimizer, with the same weights in every process.

    Adam is as PyTorch makes it by default, a loop over the parameters; with BENCHMARK_FUSED=1 it is the fused kernel.
    """
    fused = True if os.environ.get("BENCHMARK_FUSED") == "1" else None
    torch.manual_seed(0)
    model = {"tiny": _tiny, "conv": _conv, "transformer": Transformer, "embedding": Lookup}[name]()
    if name in ("tiny", "conv"):
        return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, torch.optim.Adam(model.parameters(), 1e-4, fused=fused)
