"""The table of exactness, PyTorch: every feature on 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.exactness import table
from tests.exactness.torch_cases import CASES, NAMES
from tests.support.harness import run_module

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What each number of ranks computed; a job runs all cases, for the imports take longer than they do."""
    base = tmp_path_factory.mktemp("torch")
    return {ranks: run_module("tests.exactness.torch_cases", ranks, base / str(ranks)) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("case", CASES)
def test_horovod_computes_what_shared_memory_does(jobs, case):
    """The other cases of this file travel through the memory of the host where they can."""
    for ranks in (2, 3):
        worst, bound = table.difference(jobs[ranks], jobs[1], case, " (horovod)")
        assert table.ranks_agree(jobs[ranks], f"{case} (horovod)", ranks)
        assert worst <= bound, f"{ranks} ranks"


#: of the distance that the weights moved: how far from it compressed gradients may lead in 20 steps
COMPRESSED = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "topk:0.1": 0.5, "powersgd:2": 0.5}


@pytest.mark.parametrize("compression", COMPRESSED)
def test_compressed_gradients_lead_all_ranks_to_the_same_place_nearby(jobs, compression):
    case, way = NAMES[0], f" ({compression})"
    before, after = table.load(jobs[1], case)
    moved = max(float(np.abs(new - old).max()) for old, new in zip(before, after, strict=True))
    for ranks in (2, 3):
        _, found = table.load(jobs[ranks], case + way)
        worst = max(float(np.abs(mine - wanted).max()) for mine, wanted in zip(found, after, strict=True)) / moved
        print(f"{case}, {compression}: {ranks} ranks {worst:.1e} of the distance")
        assert table.ranks_agree(jobs[ranks], case + way, ranks)
        assert worst <= COMPRESSED[compression]


@pytest.mark.parametrize("case", NAMES)
def test_ranks_compute_what_one_process_does(jobs, case):
    found = {ranks: table.difference(jobs[ranks], jobs[1], case) for ranks in (2, 3)}
    print(f"{case:40} " + "   ".join(f"{ranks} ranks {worst:.1e}" for ranks, (worst, _) in found.items()))
    for ranks, (worst, bound) in found.items():
        assert table.ranks_agree(jobs[ranks], case, ranks)
        assert worst <= bound, f"{ranks} ranks"
