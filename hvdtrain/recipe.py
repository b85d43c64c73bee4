"""What to train: a value, made by a typed function of the user's; and finding and calling that function."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import math
import operator
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.adapters import Adapter
from hvdtrain.callbacks import Callback
from hvdtrain.errors import UsageError
from hvdtrain.lr import Schedule
from hvdtrain.update import Update

RecipeFunction = Callable[..., "Recipe"]

#: modules whose package has another name
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "PyYAML", "cv2": "opencv-python", "skimage": "scikit-image"}
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
        if isinstance(self.adapter, type) or not isinstance(self.adapter, Adapter):
            raise UsageError(
                f"a recipe's adapter must be an Adapter, got {_kind(self.adapter)}",
                "wrap the model: TorchAdapter(model, optimizer, loss=...) or KerasAdapter(model, optimizer, loss=...)",
            )
        update = getattr(self.adapter, "update", None)
        if isinstance(update, Update) and update.process_sets:
            raise UsageError(
                "a recipe trains one model on all ranks, and process_sets reduce among some of them",
                "leave process_sets out, or use them in a loop of your own: hvdtrain.torch.prepare(..., process_sets=...)",
            )
        problems = []
        for name, kind, least in (("batch_size", "positive", 1), ("epochs", "positive", 1), ("seed", "", -math.inf)):
            value = getattr(self, name)
            try:
                number = operator.index(value)  # NumPy's integers become Python's, which go into JSON
            except TypeError:
                number = None
            if number is None or isinstance(value, bool) or number < least:
                problems.append(f"{name} must be a {kind} whole number, got {value!r}".replace("  ", " "))
            else:
                object.__setattr__(self, name, number)
        if not (self.lr is None or callable(self.lr) or (isinstance(self.lr, (int, float)) and not isinstance(self.lr, bool))):
            problems.append(f"lr must be a number or a function of the step, got {self.lr!r}")
        callbacks: Any = self.callbacks
        if not isinstance(callbacks, (tuple, list)):
            problems.append(f"callbacks must be a tuple of callbacks, got {_kind(callbacks)}")
        elif wrong := [_kind(each) for each in callbacks if not isinstance(each, Callback)]:
            problems.append(f"callbacks must be hvdtrain.Callback objects, got {', '.join(wrong)}")
        elif self.valid is None and (watching := [type(each).__name__ for each in callbacks if each.needs_evaluation]):
            problems.append(f"valid is None, but {', '.join(watching)} would wait for evaluations")
        if problems:
            raise UsageError(f"a recipe's {'; '.join(problems)}")
        object.__setattr__(self, "callbacks", tuple(callbacks))


def load(spec: str) -> RecipeFunction:
    """Find the recipe function that ``FILE.py[:function]`` or ``package.module:function`` names (default: ``recipe``).

    Raises:
        UsageError: there is no such file, module or function, or its module raises.
    """
    place, _, name = spec.partition(":")
    is_path = "/" in place or place.endswith(".py") or Path(place).is_dir()
    name = name or "recipe"
    if is_path and not _is_package(Path(place)):
        _refuse_script(Path(place), name)
        module = _load_file(Path(place))
    else:
        module = _load_module(place)
    function = getattr(module, name, None)
    if callable(function):
        return typing.cast(RecipeFunction, function)
    names = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    raise _no_function(place, name, names)


def _no_function(place: str, name: str, names: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(name, names, 1) or list(names[:5])
    functions = f"functions there: {', '.join(close)}; name one as {place}:{close[0]}" if close else ""
    hint = functions or f"define: def recipe() -> hvdtrain.Recipe; or a script of your own: hvdtrain run ... -- python {place}"
    return UsageError(f"{place} has no function {name!r}", hint)


def _refuse_script(path: Path, name: str) -> None:
    """Raise UsageError if the file binds no ``name``, without running it: it may be a script that trains for hours."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # loading it says what is wrong
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if not bound & {name, "*", "__getattr__"}:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise _no_function(str(path), name, functions)


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
        raise _raised("the recipe", error, _file(function), _call(function, arguments)) from error
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{_name(function)}() must return an hvdtrain.Recipe, got {_kind(recipe)}",
            "end it with: return hvdtrain.Recipe(...)",
        )
    return recipe


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        found = "is a directory" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        beside = [] if path.is_dir() else sorted(file.name for file in path.parent.glob("*.py"))
        close = difflib.get_close_matches(f"{path.stem}.py", beside, 1)
        raise UsageError(f"the recipe {path} {found}", f"did you mean {path.with_name(close[0])}?" if close else _FORMS)
    if path.suffix != ".py":
        raise UsageError(f"the recipe {path} is no .py file", _FORMS)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, so that modules beside it are found
    sys.modules[name] = module  # where pickle, in a loader's worker, looks for the recipe's classes
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            raise
        raise _raised(str(path), error, str(path), f"python {shlex.quote(str(path))}") from error
    return module


def _module_name(path: Path) -> str:
    """The file's own name, unless that would replace another module that is in use (a recipe called ``json.py``)."""
    loaded = sys.modules.get(path.stem)
    if loaded is None or getattr(loaded, "__file__", None) == str(path.resolve()):
        return path.stem
    return f"{path.stem}_recipe"


def _is_package(path: Path) -> bool:
    return path.is_dir() and path.name == str(path) and (path / "__init__.py").is_file()


def _load_module(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} names no recipe", _FORMS)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            found = f"{name}.py"
            hint = f"did you mean {found}?" if Path(found).is_file() else _FORMS
            raise UsageError(f"there is no module {name!r} for the recipe", hint) from None
        raise _raised(name, error, "", f"python -m {name}") from error
    except UsageError:
        raise
    except Exception as error:
        raise _raised(name, error, "", f"python -m {name}") from error


def _raised(what: str, error: Exception, filename: str, command: str) -> UsageError:
    """The user's own error, with the deepest line of the user's file that led to it; ``command`` raises it again."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        own = [frame for frame in frames if filename and frame.filename.endswith(filename)] or frames[-1:]
        where = f"{own[-1].filename}:{own[-1].lineno}"
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return UsageError(
            f"{where}: {text}", f"pip install {_PACKAGES.get(error.name, error.name)} into {sys.prefix}, on every host"
        )
    return UsageError(f"{what} failed at {where}: {text}", f"{command} shows the whole traceback")


def defaults(function: RecipeFunction) -> dict[str, Any]:
    """The recipe's parameters that have a default, with it."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def arguments(function: RecipeFunction, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the recipe's parameters under ``settings``."""
    return defaults(function) | _convert_all(function, settings)


def _name(function: RecipeFunction) -> str:
    return str(getattr(function, "__name__", None) or getattr(function, "func", type(function)).__name__)


def _file(function: RecipeFunction) -> str:
    """Where ``function`` was written; empty for a callable that is not written in Python."""
    inner = inspect.unwrap(getattr(function, "func", function))
    try:
        return inspect.getsourcefile(inner) or ""
    except TypeError:
        return ""


def _call(function: RecipeFunction, arguments: Mapping[str, Any]) -> str:
    """A shell command that calls ``function`` as we did."""
    place = f"{_file(function)}:{_name(function)}"
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"python -c {shlex.quote(f'import hvdtrain.recipe as r; r.load({place!r})({given})')}"


def _convert_all(function: RecipeFunction, settings: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(function).parameters.values()
    parameters = {p.name: p for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature)
    arguments: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in settings.items():
        if name in parameters:
            try:
                arguments[name] = convert(value, _hint(function, parameters[name]))
            except ValueError as error:
                problems.append(f"{name}: {error}")
        elif takes_any:
            arguments[name] = value
        else:
            close = difflib.get_close_matches(name, list(parameters), 1)
            problems.append(f"no parameter {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if problems:
        known = ", ".join(f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in parameters.values())
        raise UsageError(
            f"{_name(function)}() cannot be set so: {'; '.join(problems)}",
            f"its parameters: {known}" if known else "it has no parameter to set",
        )
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise UsageError(f"{_name(function)}() needs a value for {', '.join(missing)}", f"--set {missing[0]}=VALUE")
    return arguments


def _hint(function: RecipeFunction, parameter: inspect.Parameter) -> Any:
    """The type of ``parameter``: as annotated, or else that of its default.

    One annotation at a time: another parameter's, or the result's, may be known to type checkers only.

    Raises:
        ValueError: the annotation is text that names nothing here.
    """
    default = parameter.default
    if parameter.annotation is parameter.empty:
        return Any if default is None or default is parameter.empty else type(default)
    written = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    inner = inspect.unwrap(getattr(function, "func", function))
    namespace = getattr(inner, "__globals__", None) or vars(sys.modules.get(inner.__module__, typing))
    try:
        hint = typing.get_type_hints(written, globalns=namespace)[parameter.name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ValueError(f"its type {parameter.annotation!r} is not known where the recipe runs ({error})") from None
    return typing.Optional[hint] if default is None else hint  # noqa: UP045 - `hint | None` fails for some hints


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
        for option in options:
            try:
                if convert(value, type(option)) == option:
                    return option
            except ValueError:
                continue
        raise ValueError(f"expected one of {', '.join(map(repr, options))}, got {value!r}")
    if hint is bool and isinstance(value, str):
        if value.lower() in ("true", "yes", "on", "1"):
            return True
        if value.lower() in ("false", "no", "off", "0"):
            return False
    elif hint in (int, float):
        try:
            if isinstance(value, (str, int, hint)) and not isinstance(value, bool):
                return hint(value)
        except (ValueError, OverflowError):
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
