"""Arrays as TensorFlow's tensors without a copy."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from hvdtrain.data.tf import tensor  # noqa: E402
from hvdtrain.data.workers import aligned  # noqa: E402


def odd(array: np.ndarray) -> np.ndarray:
    """The same, beginning 8 bytes after a multiple of 64."""
    raw = aligned(array.nbytes + 8)[8:].view(array.dtype).reshape(array.shape)
    raw[...] = array
    return raw


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int32", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("where", [np.ascontiguousarray, odd, np.asfortranarray])
def test_values_and_dtype_stay(dtype, where):
    array = where(np.arange(12).reshape(3, 4).astype(dtype))
    found = tensor(array)
    assert found.dtype.name == dtype
    assert np.array_equal(found.numpy(), array)
    doubled = tf.function(lambda x: x if dtype == "bool" else x + x)(found)  # kernels ask for aligned memory
    assert np.array_equal(doubled, array if dtype == "bool" else array + array)


def test_an_array_that_begins_right_is_shared():
    array = aligned(48).view(np.float32).reshape(3, 4)
    array[:] = 1
    found = tensor(array)
    array[0, 0] = 5
    assert float(found[0, 0]) == 5


@pytest.mark.parametrize("data", [3, [1.5, 2], np.zeros((0, 4), np.float32), np.array(["a", "b"]), tf.constant([1, 2])])
def test_anything_else_is_converted(data):
    assert np.array_equal(tensor(data).numpy(), tf.convert_to_tensor(data).numpy())


def test_read_only_arrays_are_copied():
    array = aligned(16).view(np.float32)
    array[:] = 1
    array.flags.writeable = False
    assert tensor(array).numpy().tolist() == [1, 1, 1, 1]
