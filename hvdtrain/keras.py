"""A Keras script written for one process, on any number of ranks.

    model.compile(hvdtrain.keras.distribute(optimizer), ...)
    model.fit(hvdtrain.keras.shard(x, y, batch_size=64), callbacks=hvdtrain.keras.callbacks(...), ...)

``batch_size`` is that of all ranks together, and an update is that of one process on the whole batch, whatever each rank's
part of it. What is saved is plain Keras: it loads without this package.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import script
from hvdtrain.adapters.keras_fit import Averaging, Ranks, averaging
from hvdtrain.comm import Communicator
from hvdtrain.data.sampler import Sampler, Share
from hvdtrain.data.sources import ArraySource
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.update import Op, Update
from hvdtrain.world import World

__all__ = ["callbacks", "distribute", "init", "is_primary", "rank", "shard", "size"]

_WRITERS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "ProgbarLogger", "RemoteMonitor")
_SHARDED = "_hvdtrain_sharded"


def init() -> World:
    """Collective. Connect the ranks and show each its own GPU; the first call of this module does it.

    On hosts with several GPUs, call it before the model is made.
    """
    return _comm().world


def rank() -> int:
    """This process's number, from 0."""
    return _comm().world.rank


def size() -> int:
    """The number of ranks."""
    return _comm().world.size


def is_primary() -> bool:
    """Whether this is rank 0, which prints and saves."""
    return _comm().world.is_primary


def distribute(optimizer: Any, *, op: Op = "exact", prescale: float = 1.0, postscale: float = 1.0) -> Any:
    """Collective. Make ``optimizer`` (one of Keras', or its name) average gradients over the ranks before it applies them.

    It stays the same object of the same class, so it is saved and loaded as ever. Clipping, gradient accumulation and the
    finite check of a ``LossScaleOptimizer`` come after the reduction; with ``gradient_accumulation_steps`` gradients are
    reduced once per update. Of a loaded model, ``callbacks`` distribute the optimizer.

    Args:
        op: "exact": the mean over the samples of all ranks; "average", "sum" or "adasum" of the ranks' own means.
        prescale, postscale: factors on the gradients before and after their reduction.
    """
    optimizer = keras.optimizers.get(optimizer)
    update = Update(op=op, prescale=prescale, postscale=postscale)
    update.check_size(size())
    if op == "adasum" and optimizer.gradient_accumulation_steps:
        raise UsageError("op='adasum' and gradient_accumulation_steps exclude each other: the algorithm would be another one")
    if size() > 1 and averaging(optimizer) is None:
        Averaging(optimizer, update, _comm())
    return optimizer


def callbacks(*others: Any, check: bool = True) -> list[Any]:
    """Collective. The callbacks for ``fit`` and ``evaluate``: ours, and then ``others`` as this rank should have them.

    Ours give every rank the primary's weights and optimizer at the start, figures over all ranks' samples (so that early
    stopping, checkpoints and learning rates are decided alike), the same moving statistics at the end of each epoch, and
    compare the ranks then (``check``). Callbacks that write files, and progress bars, are left to the primary.
    """
    given = [callback for other in others for callback in (other if isinstance(other, (list, tuple)) else [other])]
    script.done("hvdtrain.keras.callbacks")
    if size() == 1:
        return given
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given):
        raise UsageError(
            "BackupAndRestore would restore each rank by itself", "save with ModelCheckpoint, and load the model before fit"
        )
    if not is_primary():
        given = [callback for callback in given if not _writes(callback)]
        for callback in given:
            if getattr(callback, "verbose", 0):
                callback.verbose = 0
    return [Ranks(_comm(), _hosts(), check=check), *given]


def shard(data: Any, *more: Any, batch_size: int | None = None, shuffle: bool = True, seed: int = 0) -> Any:
    """This rank's part of every batch, as a ``tf.data.Dataset`` for ``fit`` and ``evaluate``; each sample is seen once.

    All ranks get as many batches. A rank gets an empty one where a batch has fewer samples than there are ranks.

    Args:
        data, more: arrays (inputs; targets; sample weights), each an array or a dict or tuple of arrays; or one *batched*
            ``tf.data.Dataset``, of which each rank reads every batch and keeps its part. If it shuffles, it must do so alike
            on all ranks (``shuffle(n, seed=0)``). A data set that this function returned is returned as it is.
        batch_size: of arrays: samples of one batch over all ranks.
        shuffle, seed: of arrays: whether each epoch has an order of its own, and which.

    Raises:
        UsageError: a data set without batches, or arrays without a ``batch_size``.
        HvdtrainError: the ranks' data sets differ.
    """
    if size() > 1:
        script.expect(
            "hvdtrain.keras.callbacks",
            "each rank has trained a model of its own: fit(..., callbacks=hvdtrain.keras.callbacks())",
        )
    share = Share.equal(rank(), size())
    if isinstance(data, tf.data.Dataset):
        if getattr(data, _SHARDED, False):
            return data
        if batch_size is not None or more:
            raise UsageError("a tf.data.Dataset has its own batches", "shard(dataset.batch(64)), without batch_size")
        _check_batched(data)
        _check_alike(data)
        result = data if size() == 1 else data.map(lambda *batch: _part(share, batch)).prefetch(tf.data.AUTOTUNE)
    else:
        if batch_size is None or batch_size < 1:
            raise UsageError(f"shard() of arrays needs their batch_size, got {batch_size!r}", "shard(x, y, batch_size=64)")
        result = _from_arrays(ArraySource((data, *more)), share, Sampler(len(ArraySource(data)), batch_size, seed, shuffle))
    setattr(result, _SHARDED, True)
    return result


def _from_arrays(source: ArraySource, share: Share, sampler: Sampler) -> Any:
    epoch = -1

    def batches() -> Iterator[Any]:
        nonlocal epoch
        epoch += 1
        for part in sampler.epoch(epoch, 0, share):
            yield source.take(part.indices)

    specs = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), source.arrays)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
    return dataset.apply(tf.data.experimental.assert_cardinality(sampler.steps_per_epoch)).prefetch(2)


def _part(share: Share, batch: tuple[Any, ...]) -> Any:
    count = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
    low, high = count * share.before // share.total, count * (share.before + share.own) // share.total
    part = tf.nest.map_structure(lambda tensor: tensor[low:high], batch)
    return part if len(part) > 1 else part[0]


def _check_batched(dataset: Any) -> None:
    specs = tf.nest.flatten(dataset.element_spec)
    sizes = {spec.shape[0] if spec.shape.rank else "no axis" for spec in specs}
    if len(sizes) != 1 or "no axis" in sizes:
        raise UsageError(
            f"shard() needs a data set of batches, got elements {dataset.element_spec}", "shard(dataset.batch(64))"
        )


def _check_alike(dataset: Any) -> None:
    """Collective. Ranks that keep parts of other batches would see some samples twice and others never."""
    # Also of a single process: a data set that shuffles has been read once then, and goes on with its second order.
    first = [tensor.numpy().tobytes() for batch in dataset.take(1) for tensor in tf.nest.flatten(batch)]
    digests = _comm().allgather(zlib.crc32(b"".join(first)), name="shard/first batch")
    for number, digest in enumerate(digests):
        if digest != digests[0]:
            raise HvdtrainError(
                f"the first batch on rank {number} ({_hosts()[number]}) is another one than on rank 0",
                "let the data set shuffle alike on all ranks: shuffle(n, seed=0), or keras.utils.set_random_seed(0) first",
            ).everywhere()


def _writes(callback: Any) -> bool:
    return any(kind.__name__ in _WRITERS and kind.__module__.startswith("keras.") for kind in type(callback).__mro__)


def _comm() -> Communicator:
    return script.communicator("tensorflow")


def _hosts() -> tuple[str, ...]:
    return script.hosts("tensorflow")
