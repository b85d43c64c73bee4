"""A loop that goes on when ranks are lost or join, with Horovod's own elastic state.

hvdtrain run --min-np 2 --max-np 4 --host-discovery-script ./discover.sh -- python examples/torch_elastic.py

``discover.sh`` prints a line ``host:slots`` for each host that can be used now.
"""

from __future__ import annotations

import argparse
import os

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000)
steps = parser.parse_args().steps

hvd.init()
torch.manual_seed(0)
truth = torch.randn(8, 1)
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run  # on a loss: back to the last commit; when ranks join: from where they are. Then again, with those who are there
def train(state: hvd.elastic.TorchState) -> None:
    print(f"step {state.step}: {hvd.size()} ranks, this is pid {os.getpid()}\n", end="", flush=True)
    while state.step < steps:
        inputs = torch.randn(16, 8)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
        if state.step % 20 == 0:
            state.commit()
        if state.step % 500 == 0 and hvd.rank() == 0:
            print(f"step {state.step}: loss {loss.item():.4f} on {hvd.size()} ranks\n", end="", flush=True)


train(state)
