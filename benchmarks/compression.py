"""What compressors cost, what they send, and whether they train as well.

``python benchmarks/compression.py``: the time of their arithmetic and the bytes that a rank sends, for each MB of gradients;
then the handwritten digits of ``examples/torch_digits.py`` trained by two ranks (threads of this process that share the weights,
which are the same on all ranks), with the loss at the end beside that of uncompressed sums.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hvdtrain.compression import Compressor, Floats
from hvdtrain.compression.choose import parse

NAMES = ("none", "bfloat16", "float16", "topk:0.01", "topk:0.001", "powersgd:4", "powersgd:2", "powersgd:1")
RANKS = 2
SIDE = 1024  # a bucket of one matrix of so many rows and columns: 4 MB
BATCH = 64


class Echo:
    """A link whose other ranks have what this one has: everything but the communication."""

    levels, rank = None, 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = 0.0  # bytes by this rank, as links send them

    def sum(self, array: Floats) -> None:
        self.sent += 2 * (self.size - 1) / self.size * array.nbytes
        array *= self.size

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        self.sent += (self.size - 1) / self.size * parts.nbytes
        return np.broadcast_to(parts[0], parts.shape)

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        self.sent += (self.size - 1) * array.nbytes
        return np.broadcast_to(array, (self.size, *array.shape))


def cost(name: str, ranks: int = RANKS, tries: int = 15) -> tuple[float, float, float]:
    """Median and least time in ms, and bytes sent over bytes of gradients; for a bucket of 4 MB, after its first step."""
    gradient = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    compressor, link, times = parse(name), Echo(ranks), []
    for _ in range(tries + 1):
        bucket, link.sent = gradient.copy(), 0.0
        started = time.perf_counter()
        if compressor is None:
            link.sum(bucket.reshape(-1))
        else:
            compressor.exchange("bucket", [bucket], link)
        times.append(time.perf_counter() - started)
    megabytes = gradient.nbytes / 1e6
    return statistics.median(times[1:]) * 1e3 / megabytes, min(times[1:]) * 1e3 / megabytes, link.sent / gradient.nbytes


class Threads:
    """A link of a thread, over a table that all threads see."""

    levels = None

    def __init__(self, rank: int, barrier: Barrier, table: list[Any]) -> None:
        self.rank, self.size = rank, len(table)
        self._barrier, self._table = barrier, table

    def _all(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        self._table[self.rank] = array.copy()
        self._barrier.wait(60)
        everyone = list(self._table)
        self._barrier.wait(60)
        return everyone

    def sum(self, array: Floats) -> None:
        array[...] = sum(self._all(array))

    def alltoall(self, parts: NDArray[Any]) -> NDArray[Any]:
        return np.stack([other[self.rank] for other in self._all(parts)])

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.stack(self._all(array))


def curve(name: str, *, seed: int, epochs: int, warmup: int) -> tuple[float, float, float]:
    """Training loss, validation loss and accuracy at the end."""
    import torch

    torch.set_num_threads(1)
    recipe = _example()
    model, loss = recipe.adapter.model, torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs, targets = (torch.as_tensor(part) for part in recipe.train)
    parameters = list(model.parameters())
    shapes = [tuple(parameter.shape) for parameter in parameters]
    barrier, table = Barrier(RANKS), [None] * RANKS
    links = [Threads(rank, barrier, table) for rank in range(RANKS)]
    compressors = [parse(name, warmup=warmup) for _ in range(RANKS)]

    def gradients(rows: Any) -> Floats:
        grads = torch.autograd.grad(loss(model(inputs[rows]), targets[rows]) / RANKS, parameters)
        return np.concatenate([grad.numpy().reshape(-1) for grad in grads])

    order = np.random.default_rng(seed)
    with ThreadPoolExecutor(RANKS) as pool:
        for _ in range(epochs):
            for rows in _batches(order.permutation(len(inputs))):
                flats = [gradients(part) for part in np.split(rows, RANKS)]
                list(pool.map(_exchange, compressors, flats, links, [shapes] * RANKS))
                for parameter, grad in zip(parameters, _views(flats[0], shapes), strict=True):
                    parameter.grad = torch.from_numpy(grad)
                optimizer.step()
    with torch.no_grad():
        valid_x, valid_y = (torch.as_tensor(part) for part in recipe.valid)
        output = model(valid_x)
        accuracy = float((output.argmax(1) == valid_y).float().mean())
        return float(loss(model(inputs), targets)), float(loss(output, valid_y)), accuracy


def _example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "torch_digits.py"
    spec = importlib.util.spec_from_file_location("torch_digits", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.recipe()


def _batches(order: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    for first in range(0, len(order) - BATCH + 1, BATCH):
        yield order[first : first + BATCH]


def _views(flat: Floats, shapes: Sequence[tuple[int, ...]]) -> list[Floats]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)]


def _exchange(compressor: Compressor | None, flat: Floats, link: Threads, shapes: Sequence[tuple[int, ...]]) -> None:
    if compressor is None:
        link.sum(flat)
    else:
        compressor.exchange("bucket", _views(flat, shapes), link)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", choices=("cost", "training"))
    arguments.add_argument("--epochs", type=int, default=15)
    arguments.add_argument("--seeds", type=int, default=3, help="orders of the samples; medians are shown")
    arguments.add_argument("--warmup", type=int, default=22, help="steps without compression: one epoch")
    arguments.add_argument("--names", nargs="+", default=list(NAMES[1:]), help="compressors, as --compression takes them")
    options = arguments.parse_args()
    names = ["none", *options.names]
    console = Console(width=110)
    if options.only != "training":
        table = Table(title=f"For each MB of gradients, {RANKS} ranks, one thread, {SIDE} x {SIDE}")
        for column in ("compression", "ms, median", "ms, least", "bytes sent / uncompressed"):
            table.add_column(column, justify="left" if column == "compression" else "right")
        plain = cost("none")[2]
        for name in names:
            median, least, sent = cost(name)
            table.add_row(name, f"{median:.2f}", f"{least:.2f}", f"{sent / plain:.4f}")
        console.print(table)
    if options.only != "cost":
        table = Table(
            title=f"examples/torch_digits.py, {RANKS} ranks, {options.epochs} epochs, median of {options.seeds} orders"
        )
        columns = ("compression", "train loss", "quartiles", "valid loss", "quartiles", "/ none", "valid accuracy")
        for column in columns:
            table.add_column(column, justify="left" if column == "compression" else "right")
        plain_loss = 0.0
        for name in names:
            seeds = range(options.seeds)
            found = np.array([curve(name, seed=seed, epochs=options.epochs, warmup=options.warmup) for seed in seeds])
            low, middle, high = np.quantile(found, [0.25, 0.5, 0.75], axis=0)
            plain_loss = plain_loss or middle[1]
            spans = [f"{low[column]:.4f}-{high[column]:.4f}" for column in (0, 1)]
            row = (f"{middle[0]:.4f}", spans[0], f"{middle[1]:.4f}", spans[1], f"{middle[1] / plain_loss:.3f}")
            table.add_row(name, *row, f"{middle[2]:.4f}")
        console.print(table)


if __name__ == "__main__":
    main()
