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


def adapter(optimizer="sgd", **more):
    from hvdtrain.adapters.keras import KerasAdapter

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made = KerasAdapter(model, optimizer, **{"loss": "mse", **more})
    made.setup(LocalCommunicator(World()))
    return made


def test_an_optimizer_that_scales_the_loss_trains_as_one_that_does_not():
    batch = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    optimizers = [
        keras.optimizers.SGD(0.1),
        keras.optimizers.SGD(0.1, loss_scale_factor=1024.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
    ]
    losses = []
    for optimizer in optimizers:
        made = adapter(optimizer)
        made.train_step(batch, lr=None, weight=1.0)
        losses.append(made.train_step(batch, lr=None, weight=1.0)["loss"].value)
    assert losses == pytest.approx([losses[0]] * 3)


METRIC_HINT = "keras.metrics.sparse_categorical_accuracy"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"acc": keras.metrics.SparseCategoricalAccuracy()}, "'acc' is an object that keeps a state"),
        ({"acc": "accuracy"}, "'acc' must be a function"),
        (["accuracy"], "metrics must be a dict of functions, got a list"),
    ],
    ids=["object", "name", "list"],
)
def test_metrics_that_would_be_wrong_are_refused(metrics, message):
    from hvdtrain.errors import UsageError

    with pytest.raises(UsageError, match=message) as caught:
        adapter(metrics=metrics)
    assert METRIC_HINT in caught.value.hint


def test_a_saved_model_loads_in_plain_keras(tmp_path):
    made = adapter()
    made.save(tmp_path)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    other.load_weights(tmp_path / "model.weights.h5")
    for mine, theirs in zip(made.model.variables, other.variables, strict=True):
        assert np.array_equal(mine.value.numpy(), theirs.value.numpy())
