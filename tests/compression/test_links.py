"""Links between real ranks carry what links between threads carry, and compressors get the same sums over each of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.compression.test_compressors import NAMES, applied, gradients
from tests.support.harness import LAUNCHERS, ROOT, hvdtrain


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "framework", "ranks"),
    [
        ("mpirun", "numpy", 2),
        ("mpirun", "numpy", 3),
        ("horovodrun-gloo", "torch", 3),
        ("horovodrun-gloo", "tensorflow", 2),
    ],
)
def test_real_ranks_get_what_threads_get(launcher, framework, ranks, tmp_path):
    start = ["run", "-np", ranks, "-H", f"localhost:{ranks}", *LAUNCHERS[launcher], "--"]
    result = hvdtrain(*start, sys.executable, "-m", "tests.support.link_ranks", tmp_path, framework, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    everyone = [np.load(tmp_path / f"rank-{rank}.npz") for rank in range(ranks)]
    for name in NAMES:
        for other in everyone:
            np.testing.assert_array_equal(other[name], everyone[0][name])
        wanted = applied(name, gradients(3, ranks))[0, -1]
        # PowerSGD's sums over three ranks round in the order of the ring.
        np.testing.assert_allclose(everyone[0][name], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
