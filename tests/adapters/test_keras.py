"""What is particular to the Keras adapter."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.world import World

keras = pytest.importorskip("keras")


def test_batches_of_other_lengths_trace_the_step_once_more_at_most():
    from hvdtrain.adapters.keras import KerasAdapter

    traces = []

    class Watched(keras.layers.Layer):
        def call(self, inputs):
            traces.append(inputs.shape)
            return inputs

    words = keras.Input((None,))
    vectors = Watched()(keras.layers.Embedding(50, 8)(words))
    model = keras.Model(words, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(vectors)))
    adapter = KerasAdapter(model, "sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    adapter.setup(LocalCommunicator(World()))
    traces.clear()
    for count, length in [(4, 7), (3, 7), (0, 7), (4, 9), (2, 11), (1, 7)]:
        means = adapter.train_step((np.ones((count, length), np.int32), np.ones(count, np.int64)), lr=None, weight=count / 4)
        assert means["loss"].count == count
    assert len(traces) == 2
