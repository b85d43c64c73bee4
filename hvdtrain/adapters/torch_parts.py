"""What stages exchange and write: activations as messages, and the parts of a checkpoint.

A checkpoint has ``model-00001-of-00002.safetensors`` and so on, and the optimizer's state of each part by the names of its
parameters. So it can be read by another number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from hvdtrain.adapters import torch_files as files
from hvdtrain.comm import Message

#: types that NumPy does not have, as the bytes of one that it has
_ODD = {torch.bfloat16: torch.int16}


def to_message(value: Any) -> Message:
    """``value``, nested tuples, lists and dicts of tensors, with its tensors' memory where that is the host's."""
    arrays: list[Any] = []

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = _on_host(value.detach()).contiguous()
            arrays.append((tensor.view(_ODD[tensor.dtype]) if tensor.dtype in _ODD else tensor).numpy())
            return {"tensor": str(tensor.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            return {"dict": [[name, put(each)] for name, each in value.items()]}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [put(each) for each in value]}
        return {"plain": value}

    return Message(put(value), arrays)


def from_message(message: Message, device: torch.device) -> Any:
    """What was given to ``to_message``, on ``device``."""
    arrays = iter(message.arrays)

    def take(about: Any) -> Any:
        ((kind, content),) = about.items()
        if kind == "tensor":
            dtype, tensor = getattr(torch, content), torch.from_numpy(next(arrays))
            return (tensor.view(dtype) if dtype in _ODD else tensor).to(device, non_blocking=True)
        if kind == "dict":
            return {name: take(each) for name, each in content}
        if kind == "plain":
            return content
        return (list if kind == "list" else tuple)(take(each) for each in content)

    return take(message.about)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # which the device writes to directly
    return host.copy_(tensor)


def write_part(directory: Path, number: int, count: int, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Write part ``number`` (from 0) of ``count``."""
    name = f"{number + 1:05d}-of-{count:05d}"
    tensors = {key: value.contiguous() for key, value in model.items() if files.is_plain(value)}
    rest = {key: value for key, value in model.items() if key not in tensors}
    safetensors.torch.save_file(tensors, directory / f"model-{name}.safetensors", metadata={"format": "pt"})
    files.save({**optimizer, "rest": rest}, directory / f"optimizer-{name}.pt")


class Parts:
    """The parts in a directory."""

    def __init__(self, models: Sequence[Path], others: Sequence[Path]) -> None:
        self._models, self._others = models, [files.load(path) for path in others]
        #: what safetensors has no form for
        self._rest = {name: value for part in self._others for name, value in part["rest"].items()}
        self._where: dict[str, Path] = {}
        for path in models:
            with safetensors.safe_open(path, "pt") as file:
                self._where |= dict.fromkeys(file.keys(), path)

    def check(self, names: Mapping[str, str]) -> None:
        """Raise ValueError unless these are the parts of a model with the arrays ``names``: "model/NAME" -> dtype and shape."""
        of_model = ((name.removeprefix("model/"), facts) for name, facts in names.items() if name.startswith("model/"))
        wanted = {name: facts for name, facts in of_model if name not in self._rest}
        if missing := sorted(wanted.keys() - self._where.keys()):
            raise ValueError(f"it has no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
        if more := sorted(self._where.keys() - wanted.keys()):
            raise ValueError(
                f"it has {more[0]}, which the model has not" + (f", and {len(more) - 1} more" if len(more) > 1 else "")
            )
        for name, path in self._where.items():
            with safetensors.safe_open(path, "pt") as file:
                shape = tuple(file.get_slice(name).get_shape())
            if not wanted[name].endswith(f" {shape}"):
                raise ValueError(f"its {name} has the shape {shape}, the recipe's is {wanted[name]}")

    def model(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """What ``load_state_dict`` takes, of the names in ``wanted``."""
        found = {name: value for name, value in self._rest.items() if name in wanted}
        for path in self._models:
            names = [name for name in wanted if self._where.get(name) == path]
            if names:
                with safetensors.safe_open(path, "pt") as file:
                    found |= {name: file.get_tensor(name) for name in names}
        return found

    def optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> tuple[Any, Any]:
        """A state for ``optimizer.load_state_dict``, and the settings as the recipe made them then.

        ``names`` are those of the optimizer's parameters by their ``id``.
        """
        state: dict[str, Any] = {}
        groups: list[Any] = []
        built: Any = None
        for part in self._others:
            order = part["names"]
            state |= {order[place]: each for place, each in part["state"].items()}
            groups, built = groups or part["param_groups"], built or part["built"]
        mine = optimizer.state_dict()
        if len(groups) != len(mine["param_groups"]):
            raise ValueError(
                f"its optimizer has {len(groups)} groups of parameters, the recipe's has {len(mine['param_groups'])}"
            )
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        mine["state"] = {place: state[name] for place, name in enumerate(order) if name in state}
        for group, then in zip(mine["param_groups"], groups, strict=True):
            group |= {name: value for name, value in then.items() if name not in ("params", "foreach", "fused")}
        return mine, built


def read_parts(directory: Path) -> Parts:
    return Parts(sorted(directory.glob("model-*.safetensors")), sorted(directory.glob("optimizer-*.pt")))
