"""Finding, setting and calling the user's recipe function; and what is said when that cannot be."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

import hvdtrain
from hvdtrain.adapters.linear import LinearAdapter
from hvdtrain.errors import UsageError
from hvdtrain.lr import constant
from hvdtrain.recipe import Recipe, build, convert, load
from tests.support import recipes

GOOD = """
import hvdtrain
from hvdtrain.adapters.linear import LinearAdapter

def recipe(*, features: int = 2) -> hvdtrain.Recipe:
    return hvdtrain.Recipe(adapter=LinearAdapter(features, 2), train=None, batch_size=features)

def other() -> hvdtrain.Recipe:
    return recipe(features=5)
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes become modules: leave no trace of them in the other tests."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def _write(path: Path, text: str = GOOD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _fails(spec: str | Path, **settings: Any) -> UsageError:
    with pytest.raises(UsageError) as error:
        build(load(str(spec)), settings)
    assert error.value.exit_code == 2
    return error.value


# Finding it


@pytest.mark.parametrize(
    ("spec", "features"),
    [
        ("a_recipe.py", 2),
        ("a_recipe.py:", 2),
        ("a_recipe.py:recipe", 2),
        ("./a_recipe.py:other", 5),
        ("a_recipe", 2),
        ("a_recipe:other", 5),
        ("folder/b-recipe.py", 2),
        ("package.inner:other", 5),
        ("package", 2),
    ],
)
def test_each_way_to_name_a_recipe(in_tmp: Path, spec: str, features: int) -> None:
    for path in ("a_recipe.py", "folder/b-recipe.py", "package/__init__.py", "package/inner.py"):
        _write(in_tmp / path)
    assert build(load(spec), {}).batch_size == features


def test_a_recipe_finds_the_modules_beside_it(in_tmp: Path) -> None:
    _write(in_tmp / "folder" / "helper_beside.py", "SIZE = 7")
    _write(in_tmp / "folder" / "uses.py", f"import helper_beside\n{GOOD.replace('= 2)', '= helper_beside.SIZE)')}")
    assert build(load("folder/uses.py"), {}).batch_size == 7


def test_classes_of_a_recipe_can_be_pickled(in_tmp: Path) -> None:
    import pickle

    _write(in_tmp / "with_class.py", GOOD + "\nclass Data:\n    pass\n")
    kind = load("with_class.py").__globals__["Data"]  # type: ignore[attr-defined]
    assert type(pickle.loads(pickle.dumps(kind()))) is kind


def test_a_recipe_called_like_a_library_does_not_replace_it(in_tmp: Path) -> None:
    _write(in_tmp / "json.py")
    assert build(load("json.py"), {}).batch_size == 2
    assert sys.modules["json"] is json


def test_a_recipe_that_was_changed_is_read_anew(in_tmp: Path) -> None:
    assert build(load(str(_write(in_tmp / "r.py"))), {}).batch_size == 2
    assert build(load(str(_write(in_tmp / "r.py", GOOD.replace("= 2)", "= 31)")))), {}).batch_size == 31


# What cannot be loaded

BAD_FILES: dict[str, tuple[str | None, str, str]] = {
    "missing": (None, "the recipe bad.py does not exist (looked in {cwd})", "give FILE.py"),
    "empty": ("", "bad.py has no function 'recipe'", "define: def recipe() -> hvdtrain.Recipe"),
    "other name": ("def recip(): pass", "bad.py has no function 'recipe'", "name one as bad.py:recip"),
    "no function": ("recipe = 3", "bad.py has no function 'recipe'", "define: def recipe()"),
    "a script": (
        "print('trains for hours')\nraise SystemExit",
        "bad.py has no function 'recipe'",
        "or a script of your own: hvdtrain run ... -- python bad.py",
    ),
    "syntax": ("x = 1\ndef recipe(:\n", "bad.py failed at {cwd}/bad.py:2: SyntaxError: ", "python bad.py shows"),
    "bytes": ("x = '\udcff'", "bad.py failed at ", "python bad.py shows"),
    "raises on import": (
        "import os\n\nrecipe = os.no_such\n",
        "bad.py failed at {cwd}/bad.py:3: AttributeError: ",
        "python bad.py shows",
    ),
    "needs a package": (
        "import no_such_package_x as recipe",
        "{cwd}/bad.py:1: ModuleNotFoundError: ",
        "pip install no_such_package_x into",
    ),
    "raises a module error itself": (
        "raise ModuleNotFoundError('mine')\ndef recipe(): pass",
        "bad.py failed at {cwd}/bad.py:1: ModuleNotFoundError: mine",
        "python bad.py shows",
    ),
    "raises when called": (
        "def helper(x):\n    return 1 / x\n\ndef recipe():\n    return helper(0)\n",
        "the recipe failed at {cwd}/bad.py:2: ZeroDivisionError: division by zero",
        "python -c ",
    ),
    "returns nothing": (
        "def recipe():\n    pass\n",
        "recipe() must return an hvdtrain.Recipe, got None",
        "return hvdtrain.Recipe(...)",
    ),
    "returns a dict": (
        "def recipe():\n    return {}\n",
        "recipe() must return an hvdtrain.Recipe, got a dict",
        "return hvdtrain.Recipe(...)",
    ),
    "is a class": (
        "class recipe: pass",
        "recipe() must return an hvdtrain.Recipe, got a bad.recipe",
        "return hvdtrain.Recipe(...)",
    ),
    "passes rubbish to a library": (
        "import json\n\ndef recipe():\n    return json.loads('[')\n",
        "the recipe failed at {cwd}/bad.py:4: JSONDecodeError: ",
        "python -c ",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_recipe_is_told_by_place_and_cause(in_tmp: Path, name: str) -> None:
    text, message, hint = BAD_FILES[name]
    if text is not None:
        (in_tmp / "bad.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    error = _fails("bad.py")
    assert error.message.startswith(message.format(cwd=in_tmp))
    assert hint in error.hint


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("folder", "the recipe folder is a directory", "give FILE.py"),
        ("folder.py", "the recipe folder.py is a directory", "give FILE.py"),
        ("folder/good_recipe", "the recipe folder/good_recipe does not exist", "did you mean folder/good_recipe.py?"),
        ("folder/god_recipe.py", "the recipe folder/god_recipe.py does not exist", "did you mean folder/good_recipe.py?"),
        ("folder/notes.txt", "the recipe folder/notes.txt is no .py file", "give FILE.py"),
        ("folder/good_recipe.py:ricepe", "folder/good_recipe.py has no function 'ricepe'", "folder/good_recipe.py:recipe"),
        ("no_such_module", "there is no module 'no_such_module'", "give FILE.py"),
        ("hvdtrain.no_such", "there is no module 'hvdtrain.no_such'", "give FILE.py"),
        ("no-module", "'no-module' names no recipe", "give FILE.py"),
        ("", "the recipe . is a directory", "give FILE.py"),
        (".relative", "'.relative' names no recipe", "give FILE.py"),
        ("raises_value", "raises_value failed at {cwd}/raises_value.py:1: ValueError: mine", "python -m raises_value"),
        ("needs_more", "{cwd}/needs_more.py:1: ModuleNotFoundError: ", "pip install no_such_x into"),
    ],
)
def test_a_name_that_leads_nowhere_is_answered_with_what_to_type(in_tmp: Path, spec: str, message: str, hint: str) -> None:
    _write(in_tmp / "folder" / "good_recipe.py")
    _write(in_tmp / "folder" / "notes.txt", "notes")
    (in_tmp / "folder.py").mkdir()
    _write(in_tmp / "raises_value.py", "raise ValueError('mine')")
    _write(in_tmp / "needs_more.py", "import no_such_x")
    error = _fails(spec)
    assert error.message.startswith(message.format(cwd=in_tmp))
    assert hint in error.hint


def test_a_recipes_own_complaint_is_passed_on_as_it_is(in_tmp: Path) -> None:
    _write(
        in_tmp / "own.py", "from hvdtrain.errors import UsageError\ndef recipe():\n    raise UsageError('no data', 'get some')"
    )
    assert str(_fails("own.py")) == "no data\nHint: get some"


def test_the_command_in_the_hint_shows_the_whole_traceback(in_tmp: Path) -> None:
    _write(in_tmp / "it's.py", "def recipe(*, size: int):\n    return [][size]\n")
    hint = _fails("it's.py", size="3").hint
    command = shlex.split(hint.removesuffix(" shows the whole traceback"))
    assert command[0] == "python"
    result = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
    assert "return [][size]" in result.stderr
    assert "IndexError" in result.stderr


def test_a_recipe_that_failed_to_load_is_no_module(in_tmp: Path) -> None:
    _fails(_write(in_tmp / "half_done.py", "raise RuntimeError"))
    assert "half_done" not in sys.modules


# Setting its parameters


def settable(
    *,
    hidden: int = 64,
    lr: float = 0.05,
    flag: bool = False,
    name: str = "a",
    path: Path = Path("."),
    maybe: Optional[int] = None,  # noqa: UP045
    mode: Literal["min", "max"] = "min",
    level: Literal[1, 2] = 1,
    either: Union[int, str] = 1,  # noqa: UP007
    implicit: float = None,  # type: ignore[assignment]  # noqa: RUF013
    bare=3,
) -> Recipe:
    given = {**locals()}
    return Recipe(adapter=LinearAdapter(2, 2), train=given)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hidden", "128", 128),
        ("hidden", "-1", -1),
        ("hidden", 128, 128),
        ("lr", "1e-3", 0.001),
        ("lr", "2", 2.0),
        ("lr", 2, 2.0),
        ("flag", "true", True),
        ("flag", "No", False),
        ("flag", "1", True),
        ("flag", "off", False),
        ("flag", True, True),
        ("name", "b c", "b c"),
        ("name", "5", "5"),
        ("name", "", ""),
        ("path", "data/x", Path("data/x")),
        ("maybe", "3", 3),
        ("maybe", "none", None),
        ("maybe", None, None),
        ("mode", "max", "max"),
        ("level", "2", 2),
        ("level", 2, 2),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("implicit", "0.5", 0.5),
        ("implicit", None, None),
        ("bare", "4", 4),
    ],
)
def test_text_becomes_the_type_of_the_parameter(name: str, text: Any, value: Any) -> None:
    set_to = build(settable, {name: text}).train[name]
    assert set_to == value
    assert type(set_to) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hidden", "many", "int"),
        ("hidden", "1.5", "int"),
        ("hidden", 1.0, "int"),
        ("hidden", True, "int"),
        ("hidden", "", "int"),
        ("lr", "fast", "float"),
        ("lr", True, "float"),
        ("lr", [1], "float"),
        ("flag", "maybe", "bool"),
        ("flag", 2, "bool"),
        ("name", 5, "str"),
        ("path", 5, "Path"),
        ("maybe", "x", "Optional[int]"),
        ("mode", "mean", "one of 'min', 'max'"),
        ("level", "3", "one of 1, 2"),
        ("level", True, "one of 1, 2"),
        ("bare", "x", "int"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, text: Any, expected: str) -> None:
    with pytest.raises(UsageError) as error:
        build(settable, {name: text})
    # Python 3.14 writes Optional[int] as int | None
    found = error.value.message.replace("int | None", "Optional[int]")
    assert found == f"settable() cannot be set so: {name}: expected {expected}, got {text!r}"


def test_numbers_beyond_a_float_are_refused() -> None:
    with pytest.raises(ValueError, match="expected float"):
        convert(10**400, float)


def test_all_mistakes_in_settings_are_told_together_with_the_parameters() -> None:
    with pytest.raises(UsageError) as error:
        build(settable, {"hiden": "3", "lr": "fast", "zzz": "1", "flag": "maybe", "hidden": "64"})
    assert error.value.message == (
        "settable() cannot be set so: no parameter 'hiden' (did you mean 'hidden'?); lr: expected float, got 'fast'; "
        "no parameter 'zzz'; flag: expected bool, got 'maybe'"
    )
    assert error.value.hint.startswith("its parameters: hidden=64, lr=0.05, flag=False, name='a'")


def test_a_recipe_without_parameters_says_so() -> None:
    def bare() -> Recipe:
        raise AssertionError

    with pytest.raises(UsageError) as error:
        build(bare, {"x": "1"})
    assert error.value.hint == "it has no parameter to set"


def test_parameters_without_a_value_are_asked_for() -> None:
    def needy(data: str, *rest: int, classes: int, hidden: int = 3, **more: Any) -> Recipe:
        return Recipe(adapter=LinearAdapter(2, 2), train=(data, rest, classes, hidden, more))

    with pytest.raises(UsageError) as error:
        build(needy, {"hidden": "1"})
    assert error.value.message == "needy() needs a value for data, classes"
    assert error.value.hint == "--set data=VALUE"
    assert build(needy, {"data": "d", "classes": "2", "new": "n"}).train == ("d", (), 2, 3, {"new": "n"})


ANNOTATED = """
from __future__ import annotations
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional
import hvdtrain
from hvdtrain.adapters.linear import LinearAdapter
if TYPE_CHECKING:
    from somewhere_else import Recipe, Size

def recipe(*, n: int = 1, lr: float | None = None, mode: Literal["a", "b"] = "a", path: Optional[Path] = None,
           size: Size = None) -> Recipe:
    return hvdtrain.Recipe(adapter=LinearAdapter(2, 2), train=(n, lr, mode, path, size))
"""


def test_annotations_that_are_text_are_resolved(in_tmp: Path) -> None:
    function = load(str(_write(in_tmp / "annotated.py", ANNOTATED)))
    assert build(function, {"n": "2", "lr": "0.5", "mode": "b", "path": "x"}).train == (2, 0.5, "b", Path("x"), None)
    with pytest.raises(UsageError, match=r"n: expected int, got 'x'; mode: expected one of 'a', 'b', got 'c'"):
        build(function, {"n": "x", "mode": "c"})
    with pytest.raises(UsageError, match=r"size: its type 'Size' is not known where the recipe runs"):
        build(function, {"size": "3"})


class _Callable:
    def __call__(self, *, hidden: int = 1) -> Recipe:
        return Recipe(adapter=LinearAdapter(2, 2), train=hidden)


@pytest.mark.parametrize("function", [_Callable(), partial(settable, lr=0.5)], ids=["object", "partial"])
def test_whatever_can_be_called_is_a_recipe_function(function: Any) -> None:
    train = build(function, {"hidden": "9"}).train
    assert (train if isinstance(train, int) else train["hidden"]) == 9
    with pytest.raises(UsageError, match="cannot be set so: hidden: expected int, got 'x'"):
        build(function, {"hidden": "x"})


def test_a_partial_that_raises_is_told_like_a_function() -> None:
    with pytest.raises(UsageError, match=rf"the recipe failed at {re.escape(recipes.__file__)}:\d+: ValueError"):
        build(partial(recipes.linear, samples=-1), {})


# The value itself


class _NoAdapter:
    pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": _NoAdapter()}, "a recipe's adapter must be an Adapter, got a tests.test_recipe._NoAdapter"),
        ({"adapter": None}, "a recipe's adapter must be an Adapter, got None"),
        ({"adapter": LinearAdapter}, "a recipe's adapter must be an Adapter, got a type"),
        ({"batch_size": 0}, "a recipe's batch_size must be a positive whole number, got 0"),
        ({"batch_size": 32.0}, "a recipe's batch_size must be a positive whole number, got 32.0"),
        ({"epochs": True}, "a recipe's epochs must be a positive whole number, got True"),
        ({"lr": "0.1"}, "a recipe's lr must be a number or a function of the step, got '0.1'"),
        (
            {"callbacks": hvdtrain.EarlyStopping()},
            "a recipe's callbacks must be a tuple of callbacks, got a hvdtrain.callbacks.early_stopping.EarlyStopping",
        ),
        (
            {"batch_size": 0, "epochs": -1, "lr": True},
            "a recipe's batch_size must be a positive whole number, got 0; epochs must be a positive whole number, got -1; "
            "lr must be a number or a function of the step, got True",
        ),
    ],
)
def test_a_recipe_checks_what_it_is_given(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Recipe(**{"adapter": LinearAdapter(2, 2), "train": None, **fields})
    assert error.value.message == message


@pytest.mark.parametrize("rate", [None, 1, 0.1, constant(0.1)])
def test_a_recipe_takes_each_kind_of_learning_rate(rate: Any) -> None:
    assert Recipe(adapter=LinearAdapter(2, 2), train=None, lr=rate).lr is rate


def test_a_list_of_callbacks_becomes_a_tuple() -> None:
    watcher = hvdtrain.Callback()
    assert Recipe(adapter=LinearAdapter(2, 2), train=None, callbacks=[watcher]).callbacks == (watcher,)  # type: ignore[arg-type]


def test_ranks_that_reduce_in_sets_are_no_recipes() -> None:
    adapter = LinearAdapter(2, 2)
    adapter.update = hvdtrain.Update(op="average", process_sets=((0,), (1,)))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="a recipe trains one model on all ranks, and process_sets reduce among some of them"):
        Recipe(adapter=adapter, train=None)


def test_early_stopping_without_validation_data_is_refused() -> None:
    with pytest.raises(UsageError, match="valid is None, but EarlyStopping would wait for evaluations"):
        Recipe(adapter=LinearAdapter(2, 2), train=None, callbacks=(hvdtrain.EarlyStopping(),))
