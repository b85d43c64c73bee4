"""Twenty steps of models whose layers are on several ranks: the weights must be those of one process that has all of them.

``python -m tests.exactness.pipeline_cases OUT FRAMEWORK`` runs all cases one after another, as one rank of whatever job it is in.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.comm.connect import connect
from hvdtrain.config import Options
from hvdtrain.trainer import Trainer

STEPS = 20
#: how -> what differs from one process
WAYS: dict[str, dict[str, object]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {},
    "1f1b of 3 micro-batches, recomputed": {"micro_batches": 3, "recompute": True},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
}
#: ranks -> stages
LAYOUTS = {2: 2, 3: 3, 4: 2}


def ways(case: str, ranks: int) -> dict[str, dict[str, object]]:
    """All for two cases, which have layers enough; one for the others, where it does not depend on the schedule what is computed."""
    if case == "lengths" and LAYOUTS[ranks] != ranks:  # a replica's batch has another length than that of one process
        return {}
    return WAYS if case in ("gpt", "mlp") else {"1f1b": WAYS["1f1b"]}


def main(out: Path, framework: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cases = importlib.import_module(f"tests.exactness.pipeline_{framework}_cases").CASES
    comm = connect(hvdtrain.World.from_env(), {"keras": "tensorflow"}.get(framework, framework))
    for case, make in cases.items():
        for way, options in ways(case, comm.world.size).items() if comm.world.size > 1 else [("alone", {})]:
            recipe = make()
            stages = LAYOUTS.get(comm.world.size, 1)
            trainer = Trainer(recipe, comm, options=Options(max_steps=STEPS, pipeline=stages, **options))  # type: ignore[arg-type]
            trainer.prepare()
            before = {f"before {name}": array.copy() for name, array in recipe.adapter.tensors()}
            trainer.fit()
            after = {f"after {name}": array for name, array in recipe.adapter.tensors()}
            np.savez(out / f"{case} {way}-{comm.world.rank}.npz", **before, **after)
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
