"""The layers of a pipeline as the recipe lists them: modules, or functions that make them where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.errors import UsageError

#: what a layer does with its module and what comes in, where that is not to call it
Use = Callable[[Any, Any], Any]


class Layer:
    """A layer that can stand at several places, where it has the same weights.

    ::

        embed = Layer(lambda: nn.Embedding(words, width))
        layers = [embed, *blocks, embed.tied(lambda module, x: F.linear(x, module.weight))]

    Args:
        make: makes its module; called on the ranks that have the layer.
        use: ``use(module, value)`` instead of ``module(value)``.
    """

    def __init__(self, make: Callable[[], torch.nn.Module], use: Use | None = None) -> None:
        self.make, self.use, self.origin = make, use, self

    def tied(self, use: Use | None = None) -> Layer:
        """Another place of the same layer."""
        other = Layer(self.make, use)
        other.origin = self.origin
        return other


class Listed:
    """One place in the list.

    Attributes:
        name: of the place: its number, or its name in an ``nn.Sequential``.
        key: the name of the first place of the same layer.
    """

    def __init__(
        self, name: str, key: str, make: Callable[[], torch.nn.Module], use: Use | None, module: torch.nn.Module | None
    ) -> None:
        self.name, self.key, self._make, self._use, self._module = name, key, make, use, module

    def made(self, device: torch.device) -> torch.nn.Module:
        """Its module, on ``device``: a new one, unless the recipe has made it."""
        if self._module is not None:
            return self._module
        with device:
            module: Any = self._make()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"layer {self.name} must be a torch.nn.Module or make one, got a {type(module).__name__}")
        return module

    def call(self, module: torch.nn.Module, value: Any, is_first: bool) -> Any:
        """The layer's output. The first gets the members of a tuple or a dict as arguments, as a model does."""
        if self._use is not None:
            return self._use(module, value)
        if is_first and isinstance(value, dict):
            return module(**value)
        if is_first and isinstance(value, tuple):
            return module(*value)
        return module(value)

    def known_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those that the recipe has made."""
        if self._module is not None:
            for name, parameter in self._module.named_parameters():
                yield f"{self.key}.{name}", parameter

    def forget(self) -> None:
        """Another rank has it."""
        self._module = None


def listed(layers: torch.nn.Sequential | Sequence[Any]) -> list[Listed]:
    """The places of ``layers``.

    Raises:
        UsageError: there is none, or one is neither a module nor a function.
    """
    # named_children() leaves out a module that stands a second time.
    named: Any = (
        layers._modules.items() if isinstance(layers, torch.nn.Sequential) else ((str(n), e) for n, e in enumerate(layers))
    )
    found: list[Listed] = []
    keys: dict[int, str] = {}
    for name, each in named:
        if isinstance(each, torch.nn.Module):
            found.append(Listed(name, keys.setdefault(id(each), name), type(each), None, each))
        elif isinstance(each, Layer):
            found.append(Listed(name, keys.setdefault(id(each.origin), name), each.make, each.use, None))
        elif callable(each):
            found.append(Listed(name, name, each, None, None))
        else:
            raise UsageError(
                f"layer {name} must be a torch.nn.Module, a function that makes one, or a Layer, got a {type(each).__name__}",
                "TorchPipeline([nn.Linear(4, 8), lambda: nn.Linear(8, 2)], ...)",
            )
    if not found:
        raise UsageError("the model has no layer")
    return found
