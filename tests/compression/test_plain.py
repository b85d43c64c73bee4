"""Plain sums through a link: exact, and nothing is remembered."""

from __future__ import annotations

import numpy as np

from hvdtrain.compression.plain import Plain
from tests.support.links import on_ranks


def test_every_rank_gets_the_sum_and_owes_nothing():
    def work(link):
        bucket = np.arange(6, dtype=np.float32) + link.rank
        plain = Plain()
        plain.exchange("b", [bucket[:4].reshape(2, 2), bucket[4:]], link)
        plain.settle(link)
        assert plain.state() == {}
        return bucket

    for bucket in on_ranks(3, work):
        np.testing.assert_array_equal(bucket, 3 * np.arange(6) + 3)
