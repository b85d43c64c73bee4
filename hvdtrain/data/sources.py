"""Where samples come from: anything with a length that gives the samples of a list of indices."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.comm import Communicator
from hvdtrain.data.sampler import Indices, Slice
from hvdtrain.errors import HvdtrainError, UsageError


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


@runtime_checkable
class HostSource(Source, Protocol):
    """A data set that the ranks of a host can have together, once they know each other."""

    def on_host(self, comm: Communicator) -> Source:
        """Collective. What this rank is to read from."""


@dataclass(frozen=True)
class ArraySource:
    """Arrays of equal length, alone or in tuples or dicts, for example ``(images, labels)``."""

    arrays: Any

    def __post_init__(self) -> None:
        lengths = {len(leaf) if np.ndim(leaf) else "none (a single number)" for leaf in leaves(self.arrays)}
        if len(lengths) != 1 or not all(isinstance(length, int) for length in lengths):
            raise UsageError(
                f"the arrays of a data source must have one length, got {', '.join(sorted(map(str, lengths))) or 'no array'}",
                "the first axis of each array counts the samples",
            )

    def __len__(self) -> int:
        return len(leaves(self.arrays)[0])

    def take(self, indices: Indices) -> Any:
        return map_leaves(lambda array: _rows(array, indices), self.arrays)


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
        return batch if len(indices) else map_leaves(lambda array: array[:0], batch)

    def _sample(self, index: int) -> Any:
        try:
            return self.items[index]
        except BaseException as error:
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

    def on_host(self, comm: Communicator) -> Augmented:
        return replace(self, data=on_host(as_source(self.data), comm))

    def close(self) -> None:
        close(as_source(self.data))

    def take(self, indices: Indices) -> Any:
        wanted = indices if len(indices) else np.zeros(1, dtype=np.int64)  # a rank without a sample needs the shapes
        batch = as_source(self.data).take(wanted)
        samples = [
            self.function(map_leaves(operator.itemgetter(row), batch), stream(self.seed, self.epoch, index))
            for row, index in enumerate(wanted.tolist())
        ]
        return map_leaves(lambda array: array[: len(indices)], _stack(samples))


def stream(*key: int) -> np.random.Generator:
    """A random stream of its own for each ``key``, for example (seed, epoch, sample)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part % (1 << 64) for part in key])))


def on_host(source: Source, comm: Communicator) -> Source:
    """Collective. The source as it is where the ranks know each other."""
    return source.on_host(comm) if isinstance(source, HostSource) else source


def close(source: Source) -> None:
    """Collective where ``on_host`` was. Give back what that took."""
    if isinstance(source, HostSource) and callable(release := getattr(source, "close", None)):
        release()


def at_epoch(source: Source, epoch: int) -> Source:
    """The source as it is in ``epoch``."""
    return source.at_epoch(epoch) if isinstance(source, EpochSource) else source


def take(source: Source, part: Slice) -> Any:
    """The samples of ``part``. What ``source`` raises names the samples.

    Raises:
        HvdtrainError: it gave more or fewer samples than it was asked for.
    """
    try:
        batch = source.take(part.indices)
        if (count := length(batch)) not in (None, len(part.indices)):
            raise HvdtrainError(
                f"the data source gave {count} samples for {len(part.indices)} indices ({part})", "take(indices) gives one each"
            )
        return batch
    except BaseException as error:
        if not getattr(error, "__notes__", None):  # it does not name the sample yet
            error.add_note(f"in the batch of {part}")
        if isinstance(error, StopIteration):  # the first generator on its way would tell another error, without the note
            raise plain(error) from error
        raise


def plain(error: BaseException) -> RuntimeError:
    """What ``error`` says, with its notes, as one that passes generators and ends no process."""
    told = RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


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
        source = ArraySource(map_leaves(np.asarray, data))
    elif _is_source(data):
        source = data
    elif (torch := sys.modules.get("torch.utils.data")) is not None and isinstance(data, torch.Dataset):
        from hvdtrain.data.torch_dataset import DatasetSource  # imports PyTorch, which is here already

        source = DatasetSource(data)
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


def leaves(data: Any) -> list[Any]:
    """The arrays of a batch, in the order in which ``like`` puts them back."""
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in leaves(value)]
    if isinstance(data, tuple):
        return [leaf for value in data for leaf in leaves(value)]
    return [data]


def like(data: Any, arrays: Iterable[Any]) -> Any:
    """``arrays`` in the tuples and dicts of ``data``."""
    following = iter(arrays)
    return map_leaves(lambda _: next(following), data)


def length(data: Any) -> int | None:
    """The number of samples in a batch, by its first array; None where that has no length."""
    while isinstance(data, (dict, tuple)) and data:
        data = next(iter(data.values() if isinstance(data, dict) else data))
    try:
        return len(data)
    except TypeError:
        return None


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """What ``function`` makes of each array, in the tuples and dicts of ``data``."""
    if isinstance(data, dict):
        return {name: map_leaves(function, value) for name, value in data.items()}
    if isinstance(data, tuple):
        return tuple(map_leaves(function, value) for value in data)
    return function(data)


def _rows(array: Any, indices: Indices) -> Any:
    return array.take(indices, axis=0) if isinstance(array, np.ndarray) else np.take(array, indices, axis=0)


def _stack(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        return {name: _stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stack(column) for column in zip(*samples, strict=True))
    return np.stack([np.asarray(sample) for sample in samples])
