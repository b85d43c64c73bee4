"""Softmax regression in NumPy: the smallest whole adapter, and the one to read first.

It needs no framework and no Horovod, so it also runs where neither is installed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapters import batch_pair, blame
from hvdtrain.comm import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.metrics import Mean, Means

Array = NDArray[np.float64]


class LinearAdapter:
    """``softmax(x @ weights + bias)`` with cross entropy, trained by SGD with momentum.

    Args:
        features: length of an input row; inputs have shape (samples, features).
        classes: number of classes; targets have shape (samples,) and hold class numbers.
        lr: learning rate where the recipe gives none.
        momentum: part of the last update that is kept.
    """

    framework = "numpy"

    def __init__(self, features: int, classes: int, *, lr: float = 0.1, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        #: weights (features, classes), with the bias as one more row
        self.weights: Array = np.zeros((features + 1, classes))
        self.velocity: Array = np.zeros_like(self.weights)

    def setup(self, comm: Communicator, exchange: Exchange = Exchange()) -> str:  # noqa: B008 - a frozen value
        self._comm = comm
        if exchange.compression != "none" or exchange.engine == "shared":
            raise UsageError(
                "this adapter's gradients are numbers of the communicator's", "leave out --exchange and --compression"
            )
        return ""

    def sync(self, root: int = 0) -> None:
        self.weights, self.velocity = self._comm.broadcast((self.weights, self.velocity), name="state", root=root)

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield "weights", self.weights
        yield "velocity", self.velocity

    def train_step(self, batch: Any, *, lr: float | None, weight: float, seed: int | None = None) -> Means:
        inputs, targets = _rows(batch)
        probabilities = _softmax(inputs @ self.weights)
        means = _means(probabilities, targets)
        # d(cross entropy) / d(logits) = probabilities - one_hot; the mean over no sample counts as zero.
        errors = probabilities
        errors[np.arange(len(targets)), targets] -= 1.0
        local = inputs.T @ errors / max(len(targets), 1)
        # The exact gradient of the global batch: each rank's mean, weighted by its part of the samples, summed.
        total = self._comm.allreduce((weight * local).ravel(), name="gradient")
        if not np.isfinite(total).all():
            loss = means["loss"].value if len(targets) else None
            blame([] if np.isfinite(local).all() else ["weights"], loss, socket.gethostname(), self._comm)
        self.velocity = self.momentum * self.velocity + total.reshape(local.shape)
        self.weights = self.weights - (self.lr if lr is None else lr) * self.velocity
        return means

    def settle(self, *, saving: bool = False) -> None:
        pass

    def eval_step(self, batch: Any) -> Means:
        inputs, targets = _rows(batch)
        return _means(_softmax(inputs @ self.weights), targets)

    def eval_end(self) -> Mapping[str, float]:
        return {}

    def snapshot(self) -> Callable[[Path], None]:
        weights, velocity = self.weights.copy(), self.velocity.copy()

        def write(directory: Path) -> None:
            np.savez(directory / "model.npz", weights=weights)
            np.savez(directory / "optimizer.npz", velocity=velocity)

        return write

    def load(self, directory: Path) -> None:
        with np.load(directory / "model.npz", allow_pickle=False) as saved:
            weights = saved["weights"]
        with np.load(directory / "optimizer.npz", allow_pickle=False) as saved:
            velocity = saved["velocity"]
        if weights.shape != self.weights.shape:
            raise ValueError(f"weights have shape {weights.shape}, the recipe's {self.weights.shape}")
        self.weights, self.velocity = weights, velocity


def _rows(batch: Any) -> tuple[Array, NDArray[np.int64]]:
    inputs, targets, _ = batch_pair(batch)
    return np.hstack([inputs, np.ones((len(inputs), 1))]).astype(np.float64), np.asarray(targets, dtype=np.int64)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    result: Array = powers / powers.sum(axis=1, keepdims=True)
    return result


def _means(probabilities: Array, targets: NDArray[np.int64]) -> Means:
    picked = probabilities[np.arange(len(targets)), targets]
    hits = probabilities.argmax(axis=1) == targets if len(targets) else np.zeros(0)
    count = len(targets)
    return {"loss": Mean(-float(np.log(np.maximum(picked, 1e-300)).sum()), count), "accuracy": Mean(float(hits.sum()), count)}
