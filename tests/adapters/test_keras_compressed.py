"""How gradients of Keras are packed for compressors, and what becomes of them. Sums over ranks: tests/exactness."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("keras")

import keras
import tensorflow as tf

from hvdtrain.adapters import keras_compressed, keras_files, keras_update
from hvdtrain.adapters.keras_compressed import CompressedExchange
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.compression.buckets import flat
from hvdtrain.compression.topk import TopK
from hvdtrain.update import Update
from hvdtrain.world import World

MB = 2.0**20


def variables():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(20), keras.layers.Dense(7)]).trainable_variables


def exchange(update=Update(), optimizer=None):  # noqa: B008 - a frozen value
    chosen = variables()
    optimizer = optimizer or keras.optimizers.SGD(0.5)
    optimizer.build(chosen)
    local = LocalCommunicator(World())
    return chosen, CompressedExchange(TopK(0.1), chosen, optimizer, update, local, bucket_mb=600 / MB)


def test_buckets_hold_the_last_gradients_first_without_gaps():
    packed = keras_compressed._Packed((0, 1, 2, 3), variables(), 4 * 150)
    assert [key for key, _ in packed.buckets] == ["gradients 2 to 3", "gradients 0 to 1"]
    assert [flat(tensors).size for _, tensors in packed.buckets] == [147, 80]
    assert [view.shape for view in packed.views] == [(3, 20), (20,), (20, 7), (7,)]


def test_what_is_owed_where_a_layer_is_frozen_is_owed_by_another_bucket():
    chosen = variables()
    keys = [
        [key for key, _ in keras_compressed._Packed(used, [chosen[n] for n in used], 1 << 20).buckets]
        for used in ((0, 1), (2, 3))
    ]
    assert keys == [["gradients 0 to 1"], ["gradients 2 to 3"]]


@pytest.mark.parametrize(
    ("update", "factor"), [(Update(), 1.0), (Update(clip_norm=1.0), 1 / math.sqrt(227)), (Update(clip_value=0.25), 0.25)]
)
def test_gradients_are_scaled_clipped_and_applied(update, factor):
    chosen, made = exchange(update)
    before = [variable.value.numpy() for variable in chosen]
    ones = [tf.fill(variable.shape, 4.0) for variable in chosen]
    norm = made.step(made.numbers(chosen), ones, tf.constant(2.0), 2.0)
    assert norm == pytest.approx(math.sqrt(227))  # 4, less the scale of the loss, less what was counted
    for variable, then in zip(chosen, before, strict=True):
        # The optimizer itself takes the scale of the loss out again.
        np.testing.assert_allclose(variable.value.numpy(), then - 0.5 * 2.0 * factor, rtol=1e-5)


def test_gradients_that_are_not_finite_are_not_applied_and_not_remembered():
    chosen, made = exchange()
    before = [variable.value.numpy() for variable in chosen]
    spoiled = [tf.fill(variable.shape, math.nan) for variable in chosen]
    assert math.isnan(made.step(made.numbers(chosen), spoiled, None, 1.0))
    assert all(np.array_equal(variable.value.numpy(), then) for variable, then in zip(chosen, before, strict=True))
    assert all(np.isfinite(array).all() for array in made.state().values())


def test_what_is_remembered_comes_back_from_a_checkpoint(tmp_path):
    keras.utils.set_random_seed(1)
    model, optimizer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    owed = {"residual/gradients 0 to 1": np.arange(8, dtype=np.float32), "warmup": np.array(3)}
    keras_files.HostCopy().take(model, optimizer, 0.1, owed)(tmp_path)
    found = keras_files.load(tmp_path, model, optimizer, 0.1)
    assert found.keys() == owed.keys()
    assert all(np.array_equal(found[name], owed[name]) for name in owed)
    local = exchange()[1]
    local.load(found)
    local.sync(0)
    np.testing.assert_array_equal(local.state()["residual/gradients 0 to 1"], owed["residual/gradients 0 to 1"])


def test_nothing_remembered_writes_no_file(tmp_path):
    model, optimizer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    keras_files.HostCopy().take(model, optimizer, 0.1, {})(tmp_path)
    assert not (tmp_path / keras_files.EXCHANGE).exists()
    assert keras_files.load(tmp_path, model, optimizer, 0.1) == {}


def test_other_types_than_float32_are_refused():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    assert "is bfloat16" in keras_compressed.refusal(model.trainable_variables)
    assert keras_compressed.refusal(variables()) == ""


def test_limits_of_an_update():
    assert keras_update.limits(Update(), 5.0, 0.5, 2.0) == (0.5, math.inf)
    assert keras_update.limits(Update(clip_norm=10.0), 5.0, 0.5, 2.0) == (0.5, math.inf)
    assert keras_update.limits(Update(clip_norm=1.0), 5.0, 0.5, 2.0) == (0.1, math.inf)
    assert keras_update.limits(Update(clip_value=3.0), 5.0, 0.5, 2.0) == (0.5, 6.0)
