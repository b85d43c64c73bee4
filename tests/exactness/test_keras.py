"""The table of exactness, Keras: every feature on 1, 2 and 3 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.exactness import table
from tests.support.harness import run_module

pytest.importorskip("keras")
from tests.exactness.keras_cases import CASES, COMPRESSED, FITS

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What each number of ranks computed; a job runs all cases, for the imports take longer than they do."""
    base = tmp_path_factory.mktemp("keras")
    return {ranks: run_module("tests.exactness.keras_cases", ranks, base / str(ranks)) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("case", [*CASES, *FITS])
def test_ranks_compute_what_one_process_does(jobs, case):
    found = {ranks: table.difference(jobs[ranks], jobs[1], case) for ranks in (2, 3)}
    print(f"{case:40} " + "   ".join(f"{ranks} ranks {worst:.1e}" for ranks, (worst, _) in found.items()))
    for ranks, (worst, bound) in found.items():
        assert table.ranks_agree(jobs[ranks], case, ranks)
        assert worst <= bound, f"{ranks} ranks"


#: of the distance that the weights moved: how far from it compressed gradients may lead in 20 steps
NEARBY = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "topk:0.1": 0.5, "powersgd:2": 0.5}


@pytest.mark.parametrize("compression", NEARBY)
def test_compressed_gradients_lead_all_ranks_to_the_same_place_nearby(jobs, compression):
    before, after = table.load(jobs[1], COMPRESSED)
    moved = max(float(np.abs(new - old).max()) for old, new in zip(before, after, strict=True))
    for ranks in (2, 3):
        case = f"{COMPRESSED} ({compression})"
        _, found = table.load(jobs[ranks], case)
        worst = max(float(np.abs(mine - wanted).max()) for mine, wanted in zip(found, after, strict=True)) / moved
        print(f"{case}: {ranks} ranks {worst:.1e} of the distance")
        assert table.ranks_agree(jobs[ranks], case, ranks)
        assert worst <= NEARBY[compression]


WITHOUT_US = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hvdtrain", "horovod"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import keras
model = keras.models.load_model(sys.argv[1])
print("LOADED", type(model.optimizer).__module__, int(model.optimizer.iterations), model.count_params())
"""


def test_what_fit_saves_on_several_ranks_loads_where_we_are_not_installed(jobs, tmp_path):
    script = tmp_path / "load.py"
    script.write_text(WITHOUT_US)
    command = [sys.executable, str(script), str(jobs[2] / "4.keras")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "LOADED keras.src.optimizers.sgd 24 " in result.stdout, result.stdout + result.stderr
