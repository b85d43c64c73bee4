"""Arrays as TensorFlow's tensors without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.workers import ALIGN, aligned


def tensor(data: Any) -> Any:
    """``data`` as a tensor. One of numbers shares its memory with an array that nobody else writes to.

    ``tf.convert_to_tensor`` copies always. DLPack takes memory over as it is, and TensorFlow ends the process when it begins
    elsewhere than at a multiple of 64 bytes; so what does not begin there is copied, which NumPy does faster.
    """
    if not isinstance(data, np.ndarray) or data.dtype.kind not in "iuf" or not data.size or data.dtype.itemsize > 8:
        return tf.convert_to_tensor(data)
    array = data
    if not (array.flags.c_contiguous and array.flags.writeable and array.__array_interface__["data"][0] % ALIGN == 0):
        array = aligned(data.nbytes).view(data.dtype).reshape(data.shape)
        np.copyto(array, data)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
