"""The drop-in for ``fit`` as far as one process shows it; ``tests/exactness`` has the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.errors import UsageError

pytest.importorskip("keras")
import keras
import tensorflow as tf

import hvdtrain.keras
from hvdtrain.data.sampler import Share


def test_one_process_gets_everything_as_it_was():
    optimizer, stop = keras.optimizers.SGD(0.1), keras.callbacks.EarlyStopping()
    assert hvdtrain.keras.distribute(optimizer) is optimizer
    assert "apply" not in optimizer.__dict__
    assert hvdtrain.keras.callbacks([stop]) == [stop]
    assert (hvdtrain.keras.rank(), hvdtrain.keras.size(), hvdtrain.keras.is_primary()) == (0, 1, True)


def test_arrays_come_in_another_order_each_epoch_and_every_sample_once():
    data = hvdtrain.keras.shard({"a": np.arange(10.0), "b": np.zeros((10, 2))}, np.arange(10), batch_size=4)
    assert int(data.cardinality()) == 3
    epochs = [[batch[1].numpy().tolist() for batch in data] for _ in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    assert [sorted(number for batch in epoch for number in batch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_parts_of_a_batch_are_the_batch(size):
    batch = (tf.range(7), {"x": tf.reshape(tf.range(14), (7, 2))})
    parts = [hvdtrain.keras._part(Share.equal(rank, size), batch) for rank in range(size)]
    assert np.concatenate([part[0].numpy() for part in parts]).tolist() == list(range(7))
    assert np.concatenate([part[1]["x"].numpy() for part in parts]).shape == (7, 2)


def test_a_data_set_is_sharded_once():
    once = hvdtrain.keras.shard(tf.data.Dataset.range(10).batch(4))
    assert hvdtrain.keras.shard(once) is once


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((tf.data.Dataset.range(10),), "needs a data set of batches"),
        ((np.zeros(3),), "needs their batch_size"),
        ((np.zeros(3), np.zeros(4)), "needs their batch_size"),
    ],
)
def test_what_cannot_be_sharded_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        hvdtrain.keras.shard(*arguments)


def test_adasum_and_accumulation_exclude_each_other():
    with pytest.raises(UsageError, match="exclude each other"):
        hvdtrain.keras.distribute(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), op="adasum")
