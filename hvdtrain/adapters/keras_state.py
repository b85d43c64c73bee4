"""What a Keras model and its optimizer hold, and how the ranks come to hold the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.comm import Communicator

_NUMBER = re.compile(r"_\d+(?=/|_|$)")


def generators(model: Any) -> list[Any]:
    """The random streams of the model's layers, in the same order on every rank."""
    return [generator for layer in model._flatten_layers() for generator in getattr(layer, "_seed_generators", ())]


def named(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The variables that must be the same on all ranks, each by a name of its own; random streams and what is accumulated differ."""
    own = {id(generator.state) for generator in generators(model)}
    own |= {id(variable) for variable in getattr(optimizer, "_accumulated_gradients", ())}  # summed before they are applied
    owners = (("model", model), ("optimizer", optimizer))
    found = [(kind, variable) for kind, owner in owners for variable in owner.variables if id(variable) not in own]
    names = unnumbered(f"{kind}/{variable.path}" for kind, variable in found)
    return zip(names, (variable for _, variable in found), strict=True)


def unnumbered(paths: Iterable[str]) -> Iterator[str]:
    """Names for variables' paths, each another one.

    Keras numbers the layers of a process (``dense_3``): a rank that made another model before has other numbers in the same
    model, so they are left out.
    """
    seen: Counter[str] = Counter()
    for path in paths:
        name = _NUMBER.sub("", path)
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}"


def arrays(model: Any, optimizer: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """The same in host memory."""
    for name, variable in named(model, optimizer):
        array = variable.value.numpy()
        yield name, array.view(np.uint16) if variable.dtype == "bfloat16" else array


def broadcast(model: Any, optimizer: Any, comm: Communicator, hvd: Any, root: int = 0) -> None:
    """Collective. Copy ``root``'s values to every rank; without Horovod through what the ranks meet over."""
    for number, (_, variable) in enumerate(named(model, optimizer)):
        name = f"state.{number}"
        if hvd is None or variable.dtype in ("uint32", "uint64"):  # Horovod carries no such type
            variable.assign(comm.broadcast(variable.value.numpy(), name=name, root=root))
        else:
            variable.assign(hvd.broadcast(variable.value, root_rank=root, name=name))


def gathered(layers: Sequence[Any]) -> list[Any]:
    """What the layers gather by themselves in training: moving statistics and the like, no frozen weights."""
    own = [variable for layer in layers for variable in layer._non_trainable_variables]
    return list({id(variable): variable for variable in own if tf.as_dtype(variable.dtype).is_floating}.values())


def settle(layers: Sequence[Any], comm: Communicator, samples: float) -> None:
    """Collective. Give every rank the mean of what the ranks gathered, weighted by their ``samples`` since the last time."""
    variables = gathered(layers)
    if comm.world.size == 1 or not variables:
        return
    # In float64 the mean of equal float32 is exactly that value: what does not differ is not changed.
    values = [variable.value.numpy().astype(np.float64) for variable in variables]
    *_, total = sums = comm.allreduce(np.append(_flat(values) * samples, samples), name="moving statistics")
    if total > 0:
        for variable, mean in zip(variables, _split(sums[:-1] / total, values), strict=True):
            variable.assign(mean)


def metric_sums(variables: Sequence[Any], comm: Communicator) -> list[NDArray[np.float64]]:
    """Collective. The values of metrics' variables over all ranks, each by its own rule: the sum, if it has none."""
    first = comm.world.is_primary
    rules = [str(variable.aggregation) for variable in variables]
    values = [variable.value.numpy().astype(np.float64) for variable in variables]
    mine = [value if first or rule != "only_first_replica" else value * 0 for value, rule in zip(values, rules, strict=True)]
    sums = _split(comm.allreduce(_flat(mine), name="metrics"), values)
    return [total / comm.world.size if rule == "mean" else total for total, rule in zip(sums, rules, strict=True)]


def _flat(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([value.reshape(-1) for value in values])


def _split(flat: NDArray[np.float64], like: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    ends = np.cumsum([value.size for value in like])[:-1]
    return [part.reshape(value.shape) for part, value in zip(np.split(flat, ends), like, strict=True)]
