"""The files of a torch model in a checkpoint: weights as safetensors, the rest for PyTorch's safe loader.

``model.safetensors`` holds ``model.state_dict()``, shared tensors under each of their names, so that it loads without us; the
versions of the modules are in its header.
``state.pt`` holds what safetensors has no form for (complex or sparse tensors, numbers, text), where there is any.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from hvdtrain.adapters.torch_state import map_leaves, versions, with_versions
from hvdtrain.errors import UsageError

log = logging.getLogger(__name__)

MODEL, REST, OPTIMIZER = "model.safetensors", "state.pt", "optimizer.pt"
#: of the versions in the header of the weights
_VERSIONS = "hvdtrain.module_versions"
_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


class HostCopy:
    """Copies a state to host memory, each time to the same: fresh memory takes several times as long as the copy."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` as it is now, until the next call; with Python's numbers for NumPy's, which the safe loader refuses."""
        kept, self._tensors = iter(self._tensors), []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            if tensor.layout != torch.strided:
                return tensor.to("cpu", copy=True)
            target = next(kept, None)
            if target is None or (target.shape, target.dtype, target.stride()) != (tensor.shape, tensor.dtype, tensor.stride()):
                target = torch.empty_like(tensor, device="cpu")
            self._tensors.append(target)
            return target.copy_(tensor)

        copies: dict[str, Any] = _without_numpy(map_leaves(state, copy, torch.Tensor))
        return copies


def plain_copy(value: Any) -> Any:
    """A copy in host memory of its own."""
    return _without_numpy(map_leaves(value, lambda tensor: tensor.detach().to("cpu", copy=True), torch.Tensor))


def _without_numpy(tree: Any) -> Any:
    """Arrays copied, and Python's numbers for NumPy's."""
    return map_leaves(map_leaves(tree, np.copy, np.ndarray), lambda number: number.item(), np.generic)


def write(directory: Path, state: Mapping[str, Any]) -> None:
    """Write ``model`` and everything else of ``state``.

    Raises:
        UsageError: it holds what the safe loader would refuse: such a checkpoint could not be read again.
    """
    tensors = {name: value.contiguous() for name, value in state["model"].items() if is_plain(value)}
    rest = {name: value for name, value in state["model"].items() if name not in tensors}
    header = {"format": "pt"}
    if (of_modules := versions(state["model"])) is not None:
        header[_VERSIONS] = _as_json(of_modules)
    safetensors.torch.save_file(tensors, directory / MODEL, metadata=header)
    if rest:
        save(rest, directory / REST)
    save({name: value for name, value in state.items() if name != "model"}, directory / OPTIMIZER)


def read(directory: Path) -> dict[str, Any]:
    """What ``write`` was given, in host memory."""
    return {"model": read_model(directory), **load(directory / OPTIMIZER)}


def read_model(directory: Path) -> dict[str, Any]:
    """What ``model.load_state_dict`` takes."""
    rest = directory / REST
    with safetensors.safe_open(directory / MODEL, "pt") as file:
        header = file.metadata() or {}
    state = {**safetensors.torch.load_file(directory / MODEL), **(load(rest) if rest.exists() else {})}
    return with_versions(state, json.loads(header[_VERSIONS]) if _VERSIONS in header else None)


def export(directory: Path, out: Path) -> None:
    """Write the model's ``state_dict`` as a file for ``torch.load``.

    Raises:
        OSError: it cannot be written. PyTorch's writer hides why.
    """
    state = read_model(directory)
    try:
        torch.save(state, out)
    except RuntimeError as error:
        raise OSError(next(iter(str(error).splitlines()), "")) from error


def settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class; learning rate, weight decay and the like of each group of parameters, but not how it computes."""
    ways = ("params", "foreach", "fused")
    groups = [{name: value for name, value in group.items() if name not in ways} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": plain_copy(groups)}


def prefer_recipe(
    optimizer: torch.optim.Optimizer, then: Mapping[str, Any] | Sequence[Mapping[str, Any]], now: Mapping[str, Any]
) -> None:
    """Undo the loading of those ``settings`` that the recipe makes otherwise ``now`` than it did ``then``.

    The others stay as they were at the checkpoint, where a callback or a scheduler may have moved them. ``then`` is the groups
    alone in checkpoints of earlier versions.

    Raises:
        ValueError: the optimizer is of another class; PyTorch would load the one's state into the other.
    """
    groups = then["groups"] if isinstance(then, Mapping) else then
    if isinstance(then, Mapping) and then["class"] != now["class"]:
        raise ValueError(f"it holds the state of the optimizer {then['class']}, the recipe's is {now['class']}")
    told = {}
    for group, old, new in zip(optimizer.param_groups, groups, now["groups"], strict=True):
        for name in new.keys() & old.keys():
            if not _same(new[name], old[name]):
                group[name] = plain_copy(new[name])
                told[name] = f"{name} {new[name]} instead of {old[name]}"
    if told:
        log.warning("the optimizer goes on as the recipe says now: %s", ", ".join(told[name] for name in sorted(told)))


def is_plain(value: Any) -> bool:
    """Whether safetensors has a form for it."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in _DTYPES


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and bool(first == second)


def _as_json(of_modules: Mapping[str, Any]) -> str:
    try:
        return json.dumps(of_modules)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the model's state_dict() says of its modules what cannot be stored: {error}",
            "keep only numbers and text in local_metadata, beside the version",
        ) from None


def save(state: Any, path: Path) -> None:
    torch.save(state, path)
    # Its structure only: a file that the safe loader refuses is no checkpoint.
    load(path, "meta")


def load(path: Path, device: str = "cpu") -> Any:
    """Load with PyTorch's safe loader, which takes tensors and plain values, and NumPy arrays besides."""
    with torch.serialization.safe_globals(_NUMPY):
        try:
            return torch.load(path, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"the model's or the optimizer's state holds more than tensors, numbers, text and arrays: {error.args[0].splitlines()[0]}",
                "keep only such values in buffers, param_groups and get_extra_state()",
            ) from None


_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.zeros(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"},
]
