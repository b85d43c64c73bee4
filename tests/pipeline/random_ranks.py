"""``python -m tests.pipeline.random_ranks OUT COUNT``: random pipelines one after another, as one of four ranks.

Each trains three steps; the weights are compared with those of one process.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hvdtrain
from hvdtrain.adapters.torch_pipeline import TorchPipeline
from hvdtrain.comm import Communicator
from hvdtrain.comm.connect import connect
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.config import Options
from hvdtrain.trainer import Trainer

STEPS = 3


def combination(seed: int, ranks: int) -> tuple[Options, list[int], int, int]:
    """Options, the widths of the model, the batch size and the number of samples."""
    draw = random.Random(seed)
    stages = draw.choice([count for count in range(2, ranks + 1) if ranks % count == 0])
    schedule = draw.choice(["gpipe", "1f1b", "interleaved"])
    chunks = draw.randint(2, 4) if schedule == "interleaved" else 1
    layers = draw.randint(stages * chunks, stages * chunks + 5)
    parts = [1] * (stages * chunks)
    for _ in range(layers - len(parts)):
        parts[draw.randrange(len(parts))] += 1
    split = draw.choice(["parameters", ",".join(map(str, parts))])
    batch = draw.randint(1, 40)
    options = Options(
        max_steps=STEPS, pipeline=stages, schedule=schedule, virtual_stages=chunks, split=split,  # type: ignore[arg-type]
        micro_batches=draw.choice([None, 1, 2, 3, 7, 32]), recompute=draw.random() < 0.3,
    )  # fmt: skip
    return options, [draw.choice([3, 8, 40]) for _ in range(layers + 1)], batch, draw.randint(batch, 3 * batch)


def trained(seed: int, comm: Communicator) -> dict[str, np.ndarray]:
    options, widths, batch, samples = combination(seed, 4)
    if comm.world.size == 1:
        options = Options(max_steps=STEPS)
    torch.manual_seed(seed)
    layers = [
        lambda inputs=inputs, outputs=outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
        for inputs, outputs in pairwise(widths)
    ]
    draw = np.random.default_rng(seed)
    data = draw.standard_normal((samples, widths[0]), np.float32), draw.integers(0, widths[-1], samples)
    adapter = TorchPipeline(layers, lambda model: torch.optim.SGD(model.parameters(), 0.1), loss=F.cross_entropy)
    recipe = hvdtrain.Recipe(adapter=adapter, train=data, batch_size=batch, epochs=99)
    trainer = Trainer(recipe, comm, options=options)
    trainer.prepare()
    trainer.fit()
    return {name: array.copy() for name, array in adapter.tensors()}


def main(out: Path, count: int) -> None:
    torch.set_num_threads(1)
    comm = connect(hvdtrain.World.from_env(), "torch")
    alone: Any = LocalCommunicator(hvdtrain.World())
    for seed in range(count):
        found, wanted = trained(seed, comm), trained(seed, alone)
        for name, array in found.items():
            assert np.abs(array - wanted[name]).max() <= 1e-5 * max(1e-3, np.abs(wanted[name]).max()), (seed, name)
        (out / f"done-{comm.world.rank}").write_text(str(seed + 1))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
