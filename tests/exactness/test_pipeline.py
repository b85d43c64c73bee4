"""The table of exactness of pipelines: 2 and 3 stages, and 2 stages of 2 replicas."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from tests.exactness.pipeline_cases import LAYOUTS, ways
from tests.exactness.table import FLOAT32
from tests.support.harness import run_module

pytestmark = pytest.mark.ranks


def jobs_of(framework: str, base: Path) -> dict[int, Path]:
    """What each number of ranks computed."""
    module = "tests.exactness.pipeline_cases"
    return {ranks: run_module(module, ranks, base / str(ranks), framework, timeout=240) for ranks in (1, *LAYOUTS)}


@pytest.fixture(scope="module", params=["torch", "keras"])
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Path]]:
    return request.param, jobs_of(request.param, tmp_path_factory.mktemp(request.param))


def tensors(job: Path, case: str, way: str) -> list[dict[str, np.ndarray]]:
    """Of each rank, by name."""
    found = []
    for path in sorted(job.glob(f"{case} {way}-*.npz")):
        with np.load(path) as saved:
            found.append(dict(saved.items()))
    return found


def test_stages_compute_what_one_process_does(jobs):
    framework, jobs = jobs
    cases = importlib.import_module(f"tests.exactness.pipeline_{framework}_cases").CASES
    worst = 0.0
    for case in cases:
        (alone,) = tensors(jobs[1], case, "alone")
        moved = max(
            float(np.abs(alone[f"after {name[7:]}"] - old).max())
            for name, old in alone.items()
            if name.startswith("before model")
        )
        assert moved > 1e-3, f"{case}: nothing was trained"
        for ranks in LAYOUTS:
            for way in ways(case, ranks):
                everyone = tensors(jobs[ranks], case, way)
                assert len(everyone) == ranks
                assert set().union(*everyone) == alone.keys(), f"{case}, {way}, {ranks} ranks"
                found = 0.0
                for theirs in everyone:
                    for name, array in theirs.items():
                        scale = max(float(np.abs(alone[name]).max()), float(np.finfo(np.float32).tiny))
                        found = max(found, float(np.abs(array.astype(float) - alone[name]).max()) / scale)
                print(f"{framework}: {case}, {way}, {LAYOUTS[ranks]} stages on {ranks} ranks: {found:.1e}")
                worst = max(worst, found)
    assert worst <= FLOAT32
