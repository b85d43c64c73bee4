"""Proof that an installed Horovod works: two ranks train a small model on different data, and get what arithmetic says.

The workers are texts run by processes of their own, because this package imports no framework.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod.frameworks import last_line
from hvdtrain.horovod.mpi import Mpi, launch_environment, two_ranks
from hvdtrain.horovod.shell import Result, run

TIMEOUT_S = 180.0

# y = w x, squared error, rank r has x = r + 1 and target 3 x: mean gradient over 2 ranks = 2 (w - 3) (1 + 4) / 2 = 5 (w - 3),
# so with learning rate 0.1 each step halves the distance to 3.
_TORCH = """
import torch, horovod.torch as hvd
hvd.init()
w = torch.nn.Parameter(torch.tensor([float(hvd.rank())]))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1), named_parameters=[("w", w)])
hvd.broadcast_parameters({"w": w.data}, root_rank=0)
x = float(hvd.rank() + 1)
for _ in range(3):
    optimizer.zero_grad()
    ((w * x - 3 * x) ** 2).sum().backward()
    optimizer.step()
all_w = hvd.allgather(w.data).tolist()
"""
_TENSORFLOW = """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
w = tf.Variable([float(hvd.rank())])
hvd.broadcast_variables([w], root_rank=0)
x = float(hvd.rank() + 1)
for _ in range(3):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum((w * x - 3 * x) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, [w])[0])
all_w = hvd.allgather(w).numpy().tolist()
"""
_MXNET = """
import mxnet as mx, horovod.mxnet as hvd
hvd.init()
w = mx.nd.array([float(hvd.rank())])
w = hvd.broadcast(w, root_rank=0)
x = float(hvd.rank() + 1)
for _ in range(3):
    w = w - 0.1 * hvd.allreduce(2 * x * x * (w - 3), average=True)
all_w = hvd.allgather(w).asnumpy().tolist()
"""
_REPORT = """
import json, os
if hvd.rank() == 0:
    with open(os.environ["HVDTRAIN_VERIFY"], "w") as file:
        json.dump({"size": hvd.size(), "weights": all_w}, file)
hvd.shutdown()
"""
WORKERS = {"torch": _TORCH + _REPORT, "tensorflow": _TENSORFLOW + _REPORT, "mxnet": _MXNET + _REPORT}
EXPECTED = 3.0 - 3.0 / 2**3


@dataclass(frozen=True)
class Check:
    """One trial run. ``problem`` is empty if it did what it should."""

    framework: str
    controller: str
    problem: str = ""
    output: str = ""


def check(framework: str, controller: str, mpi: Mpi, environ: Mapping[str, str], path: str) -> Check:
    """Train two ranks under ``controller``: "mpi" through mpirun, "gloo" through horovodrun."""
    launcher = two_ranks(mpi)
    if controller == "gloo":
        launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2"]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-") as folder:
        worker, answer = Path(folder, "worker.py"), Path(folder, "answer.json")
        worker.write_text(WORKERS[framework], encoding="utf-8")
        env = launch_environment(environ, path) | {
            "HVDTRAIN_VERIFY": str(answer),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "1",
        }
        result = run([*launcher, sys.executable, str(worker)], env=env, cwd=Path(folder), timeout_s=TIMEOUT_S)
        text = answer.read_text(encoding="utf-8") if answer.is_file() else ""
    return Check(framework, controller, judge(result, text), result.output)


def judge(result: Result, answer: str) -> str:
    """What is wrong with a trial run; empty if nothing is."""
    if result.timed_out:
        return f"no end after {TIMEOUT_S:.0f} s"
    if not result.ok or not answer:
        return _failure(result.output) or f"exit code {result.code}"
    values = json.loads(answer)
    if values["size"] != 2:
        return f"each process believes to be one of {values['size']}, not of 2: Horovod and the launcher are not of one MPI"
    if any(abs(weight - EXPECTED) > 1e-5 for weight in values["weights"]):
        return f"wrong result: the ranks have weights {values['weights']}, the exact one is {EXPECTED}"
    return ""


def _failure(output: str) -> str:
    """The line of a Python error among what the launcher says after it."""
    for line in output.splitlines():
        text = line.partition(">:")[2] if line.startswith("[") and ">:" in line else line
        if "Error: " in text and not text.startswith((" ", "\t")):
            return text.strip()
    return last_line(output)
