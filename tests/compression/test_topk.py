"""Which elements are sent."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compression.topk import TopK
from tests.support.links import ThreadLink, on_ranks


@settings(deadline=None)
@given(seed=st.integers(0, 1000), drift=st.sampled_from([0.0, 0.3, 30.0]))
def test_the_largest_ones_are_sent_whatever_the_last_step_was(seed, drift):
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(4, 1000)).astype(np.float32) * np.exp(drift * rng.normal(size=(4, 1))).astype(np.float32)

    def work(link: ThreadLink) -> list[np.ndarray]:
        compressor, sent = TopK(0.02), []
        for gradient in gradients:
            bucket = gradient.copy() if link.rank == 0 else np.zeros(1000, np.float32)
            compressor.exchange("b", [bucket], link)
            sent.append(bucket)
        return sent

    owed = np.zeros(1000, np.float32)
    for gradient, sent in zip(gradients, on_ranks(2, work)[0], strict=True):
        owed = owed + gradient
        largest = np.argsort(np.abs(owed))[-20:]
        assert set(np.flatnonzero(sent)) == set(largest)
        np.testing.assert_array_equal(sent[largest], owed[largest])
        owed[largest] = 0
