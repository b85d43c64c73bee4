"""What stages of a Keras model exchange and write: tensors as messages, and the parts of a checkpoint.

A checkpoint has ``model-00001-of-00002.safetensors`` and so on, and the optimizer's variables of each part by the names of the
model's variables that they belong to. So it can be read by another number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.comm import Message
from hvdtrain.errors import UsageError

#: names in an optimizer's file: its variables, and what is beside them
_VARIABLE, _CLASS, _BUILT_LR = "variable/", "class", "built_lr"


def to_message(tensors: Sequence[Any], about: Any = None) -> Message:
    """Tensors, or None in the place of one, in their own memory where that is the host's; and what else the receiver is to know."""
    given = [None if tensor is None else (tf.as_dtype(tensor.dtype).name, _array(tensor)) for tensor in tensors]
    return Message([about, [each and each[0] for each in given]], [each[1] for each in given if each is not None])


def from_message(message: Message) -> tuple[list[Any], Any]:
    """What was given to ``to_message``."""
    arrays = iter(message.arrays)
    about, types = message.about

    def tensor(dtype: str) -> Any:
        found = tf.convert_to_tensor(next(arrays))
        return found if found.dtype.name == dtype else tf.bitcast(found, dtype)

    return [None if dtype is None else tensor(dtype) for dtype in types], about


def _array(tensor: Any) -> NDArray[Any]:
    if tensor.dtype == tf.bfloat16:
        tensor = tf.bitcast(tensor, tf.uint16)  # NumPy has no such type
    if "GPU" in tensor.device:
        return np.asarray(tensor.numpy())
    return np.asarray(memoryview(tensor))


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """In a type that NumPy can store, with the same bytes."""
    return array if array.dtype.kind in "biufc" else array.view(np.dtype(f"u{array.dtype.itemsize}"))


def write_part(
    directory: Path,
    number: int,
    count: int,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    kind: str,
    built_lr: float | None,
) -> None:
    """Write part ``number`` (from 0) of ``count``.

    Args:
        optimizer: its variables; ``kind`` is its class, ``built_lr`` the learning rate that the recipe gave it.
    """
    name = f"{number + 1:05d}-of-{count:05d}"
    safetensors.numpy.save_file(dict(model), directory / f"model-{name}.safetensors", metadata={"format": "np"})
    arrays: dict[str, Any] = {_VARIABLE + key: array for key, array in optimizer.items()}
    arrays[_CLASS] = np.array(kind)
    if built_lr is not None:
        arrays[_BUILT_LR] = np.array(built_lr)
    np.savez(directory / f"optimizer-{name}.npz", **arrays)


class Parts:
    """The parts in a directory.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, directory: Path) -> None:
        self._models, self._optimizers = (
            sorted(directory.glob("model-*.safetensors")),
            sorted(directory.glob("optimizer-*.npz")),
        )
        if not self._models or not self._optimizers:
            raise ValueError("it is not one of a KerasPipeline: it has no model-*.safetensors with an optimizer-*.npz")
        self._where: dict[str, Path] = {}
        for path in self._models:
            with safetensors.safe_open(path, "np") as file:
                self._where |= dict.fromkeys(file.keys(), path)

    def check(self, names: Mapping[str, str], kind: str) -> None:
        """Raise ValueError unless these are of a model with the arrays ``names``, "model/NAME" or "optimizer/NAME": dtype and shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self._models:
            with safetensors.safe_open(path, "np") as file:
                here = [name for name, where in self._where.items() if where == path]
                shapes |= {f"model/{name}": tuple(file.get_slice(name).get_shape()) for name in here}
        for path in self._optimizers:
            with np.load(path, allow_pickle=False) as saved:
                if str(saved[_CLASS]) != kind:
                    raise ValueError(f"it holds the state of the optimizer {saved[_CLASS]}, the recipe's is {kind}")
                shapes |= {f"optimizer/{name}": saved[_VARIABLE + name].shape for name in _variables(saved)}
        _refuse("has no", names.keys() - shapes.keys(), "")
        _refuse("has", shapes.keys() - names.keys(), ", which the recipe has not")
        for name, shape in shapes.items():
            if not names[name].endswith(f" {shape}"):
                raise ValueError(f"its {name} has the shape {shape}, the recipe's is {names[name]}")

    def model(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The values of these variables."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(safetensors.safe_open(path, "np")) for path in self._models}
            return {name: files[self._where[name]].get_tensor(name) for name in names}

    def optimizer(self, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], float | None]:
        """The values of these variables, and the learning rate that the recipe gave then."""
        found: dict[str, NDArray[Any]] = {}
        then: float | None = None
        for path in self._optimizers:
            with np.load(path, allow_pickle=False) as saved:
                found |= {name: saved[_VARIABLE + name] for name in set(_variables(saved)) & set(names)}
                then = float(saved[_BUILT_LR]) if _BUILT_LR in saved else then
        return found, then


def _variables(saved: Any) -> list[str]:
    return [name.removeprefix(_VARIABLE) for name in saved if name.startswith(_VARIABLE)]


def _refuse(verb: str, names: set[str], why: str) -> None:
    """Raise ValueError if there are such ``names``."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"it {verb} {min(names)}{more}{why}")


def states(optimizer: Any, variables: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The variables of a built ``optimizer`` by names that hold the names of the ``variables`` they belong to.

    Raises:
        UsageError: it has others, which nobody could divide among stages.
    """
    own = {id(variable) for variable in optimizer.variables}
    found: dict[str, Any] = {}
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        if id(value) in own:
            found[name] = value
        elif (
            isinstance(value, list) and len(value) == len(variables) and attribute not in ("_variables", "_trainable_variables")
        ):
            pairs = zip(variables, value, strict=True)
            found |= {f"{of}/{name}": state for (of, _), state in pairs if id(state) in own}
    if {id(variable) for variable in found.values()} != own:
        raise UsageError(
            f"the state of {type(optimizer).__name__} is not one for each variable, and cannot be divided among stages",
            "use another optimizer",
        )
    return found
