"""A recipe for elastic jobs: each process writes down which samples it brings to each step, and which steps it has done."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from tests.support.recipes import CLASSES, FEATURES, SAMPLES, arrays

BATCH = 64


def recipe(*, framework: str, out: str, pause: float = 0.02, die: str = "", epochs: int = 8) -> hvdtrain.Recipe:
    """``die``: HOST:STEP, where the process on HOST kills itself when it has begun STEP. A file OUT/finish ends the training."""
    inputs, targets = arrays()
    # The first feature of a sample is its number.
    data = np.hstack([np.arange(SAMPLES, dtype=np.float32)[:, None] / SAMPLES, inputs]), targets
    adapter, weights = _adapter(framework)
    note = Notes(Path(out), adapter, weights, pause, die)
    return hvdtrain.Recipe(
        adapter=adapter, train=data, valid=arrays_with_number(), batch_size=BATCH, epochs=epochs, seed=5, callbacks=(note,)
    )


def arrays_with_number() -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = arrays(101, 8)
    return np.hstack([np.zeros((101, 1), np.float32), inputs]), targets


def _adapter(framework: str) -> tuple[Any, Any]:
    if framework == "torch":
        import torch

        from hvdtrain.adapters.torch import TorchAdapter

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES + 1, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
        optimizer = torch.optim.AdamW(model.parameters(), 0.004)
        return TorchAdapter(model, optimizer, loss=torch.nn.functional.cross_entropy), lambda: [
            p.detach().numpy() for p in model.parameters()
        ]
    import keras

    from hvdtrain.adapters.keras import KerasAdapter

    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((FEATURES + 1,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = KerasAdapter(net, keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return made, lambda: [v.value.numpy() for v in net.trainable_variables]


class Notes(hvdtrain.Callback):
    """``OUT/PROCESS.jsonl``: a line for each step begun, with the samples, and one for each step done; ``.npz``: the weights."""

    def __init__(self, out: Path, adapter: Any, weights: Any, pause: float, die: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        host = os.environ.get("HOROVOD_HOSTNAME", "alone")
        self.path = out / f"{host}-{os.environ.get('HOROVOD_LOCAL_RANK', 0)}-{os.getpid()}.jsonl"
        self.weights, self.step, self.size = weights, 0, 1
        die_at = int(die.rpartition(":")[2]) if die.rpartition(":")[0] == host else -1
        setup, train_step = adapter.setup, adapter.train_step

        def noted_setup(comm: Any, exchange: Any) -> str:
            self.size = comm.world.size
            return setup(comm, exchange)

        def noted_step(batch: Any, **more: Any) -> Any:
            self.write("begin", samples=np.rint(batch[0][:, 0] * SAMPLES).astype(int).tolist())
            if self.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause)
            means = train_step(batch, **more)
            self.write("end")
            return means

        adapter.setup, adapter.train_step = noted_setup, noted_step

    def write(self, what: str, **more: Any) -> None:
        line = {"time": time.time(), "what": what, "step": self.step, "size": self.size, **more}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_start(self, state: Any) -> None:
        self.step = state.step

    def on_step_end(self, state: Any) -> str | None:
        self.step = state.step
        return "the test has seen enough" if (self.path.parent / "finish").exists() else None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def on_end(self, state: Any) -> None:
        np.savez(self.path.with_suffix(".npz"), *self.weights())


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]


def lost_and_repeated(out: Path, expected: list[list[int]]) -> tuple[int, int]:
    """How many samples of the ``expected`` steps were left out, and how many were trained on more than once.

    A step counts with the samples that all ranks of a world brought, if one of them has done it.
    """
    brought: dict[tuple[int, int], list[int]] = {}
    done = set()
    for line in lines(out):
        key = line["step"], line["size"]
        if line["what"] == "begin":
            brought.setdefault(key, []).extend(line["samples"])
        else:
            done.add(key)
    lost = repeated = 0
    for step, samples in enumerate(expected):
        trained: Counter[int] = Counter()
        for key in (key for key in done if key[0] == step):
            trained.update(brought[key])
        lost += sum(sample not in trained for sample in samples)
        repeated += sum(trained.values()) - len(trained)
    return lost, repeated


def final_weights(out: Path) -> list[list[np.ndarray]]:
    found = []
    for path in sorted(out.glob("*.npz")):
        with np.load(path) as saved:
            found.append([saved[name] for name in saved.files])
    return found
