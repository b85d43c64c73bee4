"""Rounding to 16 bits, and scales that follow the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.compression.buckets import CHUNK
from hvdtrain.compression.halves import Bfloat16Codec, Float16, Float16Codec, sum_halves
from tests.support.links import ThreadLink, on_ranks


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_bfloat16_rounds_as_pytorch_does(bits):
    values = np.array(bits, np.uint32).view(np.float32)
    halves, back = np.empty(values.size, np.uint16), np.empty(values.size, np.float32)
    codec = Bfloat16Codec()
    codec.encode(values, halves)
    codec.decode(halves, back)
    np.testing.assert_array_equal(back, torch.from_numpy(values).bfloat16().float().numpy())


def test_float16_keeps_what_is_too_large_for_it_at_its_largest_value():
    values = np.array([1e6, -1e6, 3.0, np.inf, np.nan], np.float32)
    halves, back = np.empty(5, np.uint16), np.empty(5, np.float32)
    codec = Float16Codec(-2)
    codec.encode(values, halves)
    codec.decode(halves, back)
    np.testing.assert_array_equal(back[:3], np.float32([4 * 65504, -4 * 65504, 3]))
    assert not np.isfinite(back[3:]).any()


@pytest.mark.parametrize("size", [1, 2, 3, CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_of_any_size_are_cut_into_slices(size, ranks):
    def work(link: ThreadLink) -> np.ndarray:
        bucket = np.arange(size, dtype=np.float32) % 64 + link.rank
        sum_halves(bucket, link, Bfloat16Codec(), None)
        return bucket

    for found in on_ranks(ranks, work):
        np.testing.assert_array_equal(found, np.arange(size) % 64 * ranks + sum(range(ranks)))


def test_a_scale_follows_gradients_that_grow_or_shrink_at_once():
    line = np.arange(-50, 51, dtype=np.float32)  # float16 has these
    sizes = (2.0 ** np.array([0, -40, -40, 40, 40, 40])).astype(np.float32)

    def work(link: ThreadLink) -> list[np.ndarray]:
        compressor, results = Float16(), []
        for size in sizes:
            bucket = line * size
            compressor.exchange("b", [bucket], link)
            results.append(bucket)
        return results

    found = on_ranks(2, work)[0]
    np.testing.assert_array_equal(found[0], 2 * line)
    np.testing.assert_array_equal(found[1], 0 * line)  # too small for the scale of the step before
    np.testing.assert_array_equal(found[2], 4 * line * sizes[1])  # both steps'
    assert np.abs(found[3]).max() < sizes[3]  # too large
    np.testing.assert_allclose(found[4], 4 * line * sizes[3], rtol=1e-3)
    np.testing.assert_allclose(found[5], 2 * line * sizes[3], rtol=1e-1)
