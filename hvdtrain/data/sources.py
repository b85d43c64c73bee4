"""Where samples come from: anything with a length that gives the samples of a list of indices."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError


@runtime_checkable
class Source(Protocol):
    """A finite data set with random access."""

    def __len__(self) -> int: ...

    def take(self, indices: Indices) -> Any:
        """The samples at ``indices`` as one batch: arrays (first axis: samples), in tuples or dicts."""


@runtime_checkable
class EpochSource(Source, Protocol):
    """A data set that gives other samples in each epoch."""

    def at_epoch(self, epoch: int) -> Source:
        """The data set as it is in ``epoch``."""


@dataclass(frozen=True)
class ArraySource:
    """Arrays of equal length, alone or in tuples or dicts, for example ``(images, labels)``."""

    arrays: Any

    def __post_init__(self) -> None:
        lengths = {len(leaf) if np.ndim(leaf) else "none (a single number)" for leaf in _leaves(self.arrays)}
        if len(lengths) != 1 or not all(isinstance(length, int) for length in lengths):
            raise UsageError(
                f"the arrays of a data source must have one length, got {', '.join(sorted(map(str, lengths))) or 'no array'}",
                "the first axis of each array counts the samples",
            )

    def __len__(self) -> int:
        return len(_leaves(self.arrays)[0])

    def take(self, indices: Indices) -> Any:
        return _map(lambda array: np.take(array, indices, axis=0), self.arrays)


@dataclass(frozen=True)
class ItemSource:
    """A data set that gives one sample an index (``torch.utils.data.Dataset`` and the like), stacked into batches."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: Indices) -> Any:
        # A rank without a sample still needs the batch's structure and shapes: those of sample 0, emptied.
        samples = [self._sample(index) for index in indices.tolist() or [0]]
        try:
            batch = _stack(samples)
        except Exception as error:
            error.add_note(
                f"while stacking samples {indices.tolist()[:8]} into a batch: all need the same structure and shapes"
            )
            raise
        return batch if len(indices) else _map(lambda array: array[:0], batch)

    def _sample(self, index: int) -> Any:
        try:
            return self.items[index]
        except Exception as error:
            error.add_note(f"while loading sample {index}")
            raise


@dataclass(frozen=True)
class Augmented:
    """A data set whose samples are changed at random, alike at any number of ranks.

    ``function(sample, random)`` gets a sample (arrays without the first axis, in tuples or dicts as the data has them) and
    a ``numpy.random.Generator`` that is a function of (seed, epoch, sample) alone, and returns the changed sample.
    """

    data: Any
    function: Callable[[Any, np.random.Generator], Any]
    seed: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(as_source(self.data))

    def at_epoch(self, epoch: int) -> Augmented:
        return replace(self, epoch=epoch)

    def take(self, indices: Indices) -> Any:
        wanted = indices if len(indices) else np.zeros(1, dtype=np.int64)  # a rank without a sample needs the shapes
        batch = as_source(self.data).take(wanted)
        samples = [
            self.function(_map(operator.itemgetter(row), batch), stream(self.seed, self.epoch, index))
            for row, index in enumerate(wanted.tolist())
        ]
        return _map(lambda array: array[: len(indices)], _stack(samples))


def stream(*key: int) -> np.random.Generator:
    """A random stream of its own for each ``key``, for example (seed, epoch, sample)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part % (1 << 64) for part in key])))


def as_source(data: Any) -> Source:
    """Take what people have: a source, arrays (alone, in tuples or dicts), or a data set with ``[index]`` and ``len``.

    Raises:
        UsageError: ``data`` is none of these, or empty.
    """
    source: Source
    if isinstance(data, list):
        raise UsageError(
            "a list as data may mean arrays or samples",
            "give arrays as a tuple, (inputs, targets), and a list of samples as hvdtrain.data.sources.ItemSource(samples)",
        )
    if isinstance(data, (tuple, dict)) or hasattr(data, "__array__"):
        source = ArraySource(_map(np.asarray, data))
    elif _is_source(data):
        source = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes)):
        source = ItemSource(data)
    else:
        raise UsageError(
            f"no data source can be made of a {type(data).__module__}.{type(data).__qualname__}",
            "give arrays as (inputs, targets), a data set with [index] and len(), or an object with take(indices) and len()",
        )
    if len(source) == 0:
        raise UsageError("the data source has no sample", "check the path or the filter that makes it")
    return source


def _is_source(data: Any) -> bool:
    """Whether ``data`` has *our* ``take``: tf.data's and Hugging Face's data sets have one that gives the first n samples."""
    return isinstance(data, Source) and "indices" in inspect.signature(data.take).parameters


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _leaves(value)]
    if isinstance(data, tuple):
        return [leaf for value in data for leaf in _leaves(value)]
    return [data]


def length(data: Any) -> int | None:
    """The number of samples in a batch, by its first array; None where that has no length."""
    while isinstance(data, (dict, tuple)) and data:
        data = next(iter(data.values() if isinstance(data, dict) else data))
    try:
        return len(data)
    except TypeError:
        return None


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _map(function, value) for name, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_map(function, value) for value in data)
    return function(data)


def _stack(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        return {name: _stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stack(column) for column in zip(*samples, strict=True))
    return np.stack([np.asarray(sample) for sample in samples])
