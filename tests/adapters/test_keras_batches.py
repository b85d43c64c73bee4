"""Batches as tensors, and traced functions that are called without detours."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

import tensorflow as tf

from hvdtrain.adapters.keras_batches import Batches
from hvdtrain.adapters.keras_traced import Direct, Traced


def random_batch(count: int, seed: int):
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 3)).astype(np.float32), random.integers(0, 9, count)


def test_batches_of_one_shape_come_in_the_same_tensors():
    batches = Batches(on_host=True)
    first = batches.tensors(random_batch(6, 0))
    for seed in (1, 2):
        batch = random_batch(6, seed)
        inputs, targets, count = batches.tensors(batch)
        assert inputs is first[0]
        assert targets is first[1]
        assert count == 6
        assert np.array_equal(inputs.numpy(), batch[0])
        assert np.array_equal(targets.numpy(), batch[1])


def test_other_shapes_and_types_come_as_they_are():
    batches = Batches(on_host=True)
    for count, dtype in [(6, np.float32), (5, np.float32), (6, np.float64), (0, np.float32), (6, np.float16)]:
        inputs, targets = random_batch(count, count)
        found = batches.tensors((inputs.astype(dtype), targets))
        assert found[0].dtype.as_numpy_dtype is dtype
        assert np.array_equal(found[0].numpy(), inputs.astype(dtype))
        assert np.array_equal(found[1].numpy(), targets)
        assert found[2] == count


def test_several_inputs_and_what_is_no_number_keep_their_form():
    words, flags, numbers = np.array(["a", "b"]), np.array([True, False]), np.arange(12.0).reshape(2, 6)[:, ::2]
    inputs, targets, count = Batches(on_host=True).tensors(({"words": words, "numbers": numbers}, (flags, tf.constant([1, 2]))))
    assert inputs["words"].numpy().tolist() == [b"a", b"b"]
    assert inputs["numbers"].numpy().tolist() == numbers.tolist()
    assert targets[0].numpy().tolist() == [True, False]
    assert targets[1].numpy().tolist() == [1, 2]
    assert count == 2


def test_on_a_gpu_each_batch_has_memory_of_its_own():
    batches = Batches(on_host=False)
    assert batches.tensors(random_batch(4, 0))[0] is not batches.tensors(random_batch(4, 0))[0]


def test_a_traced_function_of_a_nest_gets_and_returns_it():
    def function(inputs, factor):
        return {"sum": (inputs["a"] + inputs["b"]) * factor}

    traced = Traced(function)
    for count in (3, 2, 3):
        found = traced({"b": tf.ones(count), "a": tf.zeros(count)}, tf.constant(2.0))
        assert found["sum"].numpy().tolist() == [2.0] * count
    assert traced.traces == 1
    with pytest.raises((TypeError, ValueError)):
        traced({"b": tf.ones(2), "c": tf.zeros(2)}, tf.constant(2.0))


def test_tensors_of_another_type_are_traced_anew():
    traced = Traced(lambda inputs: inputs + inputs)
    assert traced(tf.ones(3)).numpy().tolist() == [2.0] * 3
    assert traced(tf.ones(3, tf.int64)).numpy().tolist() == [2] * 3
    assert traced.traces == 2


def test_what_fails_inside_names_the_line():
    def function(rows):
        return tf.gather(tf.zeros(2), rows)

    direct = Direct(function, [tf.TensorSpec((None,), tf.int32)])
    assert direct([tf.constant([1])])[0].numpy().tolist() == [0.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"test_keras_batches\.py.*line"):
        direct([tf.constant([7])])
