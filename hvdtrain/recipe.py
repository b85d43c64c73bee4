"""What to train: a value, made by a typed function of the user's; and finding and calling that function."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.callbacks import Callback
from hvdtrain.errors import UsageError
from hvdtrain.lr import Schedule

RecipeFunction = Callable[..., "Recipe"]

_FORMS = "give FILE.py, FILE.py:function or package.module:function"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train.

    Attributes:
        adapter: the model in its framework.
        train: the training data: arrays as ``(inputs, targets)``, a data set with ``[index]`` and ``len()``, or a source.
        valid: data to evaluate on, likewise; None evaluates nothing.
        batch_size: samples of one update over *all* ranks, so the result does not depend on their number.
        epochs: passes over the training data.
        lr: learning rate, as a number or a function of the step (``hvdtrain.lr``); None leaves the optimizer's own.
        seed: with the epoch it fixes the order of the samples.
        shuffle: whether each epoch has an order of its own.
        callbacks: watchers of the loop.
    """

    adapter: Adapter
    train: Any
    valid: Any = None
    batch_size: int = 64
    epochs: int = 1
    lr: float | Schedule | None = None
    seed: int = 0
    shuffle: bool = True
    callbacks: tuple[Callback, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.adapter, Adapter):
            raise UsageError(
                f"a recipe's adapter must be an Adapter, got {_kind(self.adapter)}",
                "wrap the model: TorchAdapter(model, optimizer, loss=...) or KerasAdapter(model, optimizer, loss=...)",
            )
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"a recipe's {name} must be a positive whole number, got {value!r}")
        object.__setattr__(self, "callbacks", tuple(self.callbacks))


def load(spec: str) -> RecipeFunction:
    """Find the recipe function that ``FILE.py[:function]`` or ``package.module:function`` names (default: ``recipe``).

    Raises:
        UsageError: there is no such file, module or function, or its module raises.
    """
    place, _, name = spec.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    name = name or "recipe"
    function = getattr(module, name, None)
    if callable(function):
        return typing.cast(RecipeFunction, function)
    names = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    close = difflib.get_close_matches(name, names, 1) or names[:5]
    raise UsageError(
        f"{place} has no function {name!r}",
        f"functions there: {', '.join(close)}; name one as {place}:{close[0]}"
        if close
        else "define: def recipe() -> hvdtrain.Recipe",
    )


def build(function: RecipeFunction, settings: Mapping[str, Any]) -> Recipe:
    """Call the recipe function with ``settings``; strings are converted to the types of its parameters.

    Raises:
        UsageError: an unknown or mistyped setting, the function raises, or it returns no Recipe.
    """
    arguments = _convert_all(function, settings)
    try:
        recipe = function(**arguments)
    except UsageError:
        raise
    except Exception as error:
        raise _raised("the recipe", error, function.__code__.co_filename) from error
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{function.__name__}() must return an hvdtrain.Recipe, got {_kind(recipe)}",
            "end it with: return hvdtrain.Recipe(...)",
        )
    return recipe


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"the recipe {path} {found} (looked in {Path.cwd()})", _FORMS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, so that modules beside it are found
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:
        raise _raised(str(path), error, str(path)) from error
    return module


def _load_module(name: str) -> types.ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"there is no module {name!r} for the recipe", _FORMS) from None
        raise _raised(name, error, "") from error
    except ValueError:
        raise UsageError(f"{name!r} names no recipe", _FORMS) from None
    except Exception as error:
        raise _raised(name, error, "") from error


def _raised(what: str, error: Exception, filename: str) -> UsageError:
    """The user's own error, with the deepest line of the user's file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        own = [frame for frame in frames if filename and frame.filename.endswith(filename)] or frames[-1:]
        where = f"{own[-1].filename}:{own[-1].lineno}"
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    if isinstance(error, ModuleNotFoundError):
        return UsageError(
            f"{where}: {text}", f"pip install the package that has {error.name!r} into {sys.prefix}, on every host"
        )
    return UsageError(f"{what} failed at {where}: {text}", f"python {filename or '-m ' + what} shows the whole traceback")


def _convert_all(function: RecipeFunction, settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    arguments: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in settings.items():
        if name not in parameters:
            close = difflib.get_close_matches(name, list(parameters), 1)
            problems.append(f"no parameter {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
            continue
        default = parameters[name].default
        hint = hints.get(name, type(default) if default not in (None, inspect.Parameter.empty) else Any)
        try:
            arguments[name] = convert(value, hint)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        known = ", ".join(f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in parameters.values())
        raise UsageError(
            f"{function.__name__}() cannot be set so: {'; '.join(problems)}",
            f"its parameters: {known}" if known else "it has no parameter to set",
        )
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments and p.kind != p.VAR_KEYWORD
    ]
    if missing:
        raise UsageError(f"{function.__name__}() needs a value for {', '.join(missing)}", f"--set {missing[0]}=VALUE")
    return arguments


def convert(value: Any, hint: Any) -> Any:
    """Make ``value``, text from a command line or a plain value from a file, one of type ``hint``.

    Raises:
        ValueError: it cannot be one; the message says what was expected.
    """
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if type(None) in options and (value is None or value in ("none", "None", "null")):
            return None
        for option in options:
            try:
                return convert(value, option)
            except ValueError:
                continue
        raise ValueError(f"expected {_type_name(hint)}, got {value!r}")
    if typing.get_origin(hint) is typing.Literal:
        if value in options:
            return value
        raise ValueError(f"expected one of {', '.join(map(repr, options))}, got {value!r}")
    if hint is bool and isinstance(value, str):
        if value.lower() in ("true", "yes", "on", "1"):
            return True
        if value.lower() in ("false", "no", "off", "0"):
            return False
    elif hint in (int, float) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            if hint is float or not isinstance(value, float):
                return hint(value)
        except ValueError:
            pass
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint in (Any, inspect.Parameter.empty) or (isinstance(hint, type) and isinstance(value, hint)):
        return value
    raise ValueError(f"expected {_type_name(hint)}, got {value!r}")


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
