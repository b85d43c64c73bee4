"""The table of exactness, PyTorch: every feature on 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("case", NAMES)
def test_ranks_compute_what_one_process_does(jobs, case):
    found = {ranks: table.difference(jobs[ranks], jobs[1], case) for ranks in (2, 3)}
    print(f"{case:40} " + "   ".join(f"{ranks} ranks {worst:.1e}" for ranks, (worst, _) in found.items()))
    for ranks, (worst, bound) in found.items():
        assert table.ranks_agree(jobs[ranks], case, ranks)
        assert worst <= bound, f"{ranks} ranks"
