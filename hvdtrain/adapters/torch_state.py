"""A model's and an optimizer's state: copied between ranks, and named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from hvdtrain.comm import Communicator


def broadcast(
    state: Any,
    comm: Communicator,
    send: Callable[[Sequence[torch.Tensor], int], None],
    *,
    device: torch.device,
    root: int = 0,
) -> Any:
    """Collective. ``root``'s nested dicts, lists and tuples of tensors and plain values, on every rank.

    ``send`` copies the values of tensors, which have the same shapes on all ranks, from ``root``.
    """
    mine = comm.world.rank == root
    shapes = comm.broadcast(map_leaves(state, _Shape.of, torch.Tensor) if mine else None, name="state/shapes", root=root)
    copy = state if mine else map_leaves(shapes, lambda shape: shape.empty(device), _Shape)
    tensors: list[torch.Tensor] = []
    map_leaves(copy, lambda tensor: tensors.append(_sendable(tensor)), torch.Tensor)
    send(tensors, root)
    return copy


def named_arrays(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every parameter, buffer and tensor of the optimizer's state, in host memory, by a name that people know.

    ``names`` are those of parameters by their ``id``, if they are others than in ``model``.
    """
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield f"model/{name}", _array(tensor)
    names = names or {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"optimizer/{names[id(parameter)]}/{key}", _array(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the state that was loaded the order of elements in memory that its parameter has: kernels walk both side by side."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(
                    value
                )


def map_leaves(tree: Any, function: Callable[[Any], Any], leaf: type) -> Any:
    """Apply ``function`` to the leaves of type ``leaf`` of nested dicts, lists and tuples, in order.

    A model's state stays one: the versions of its modules, by which they read older ones, go with it.
    """
    if isinstance(tree, leaf):
        return function(tree)
    if isinstance(tree, Mapping):
        return with_versions({name: map_leaves(value, function, leaf) for name, value in tree.items()}, versions(tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(value, function, leaf) for value in tree)
    return tree


def versions(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What ``model.state_dict()`` says of its modules beside their tensors, if it does."""
    return getattr(state, "_metadata", None)


def with_versions(state: dict[str, Any], of_modules: Mapping[str, Any] | None) -> dict[str, Any]:
    """``state`` as ``model.load_state_dict`` takes it, with what ``versions`` gave."""
    if of_modules is None:
        return state
    ordered = OrderedDict(state)
    vars(ordered)["_metadata"] = of_modules
    return ordered


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as Horovod takes it: contiguous, and as bytes where it does not know the type (booleans and the like)."""
    tensor = tensor.detach().contiguous()
    known = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    return tensor if tensor.dtype in known else tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Shape:
    """What a rank must know to make room for another rank's tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    #: counters of an optimizer stay in host memory
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device="cpu" if self.on_host else device)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
