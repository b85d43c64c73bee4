"""Options: command line over environment over file over default, each with its origin."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config import Config, Options, resolve
from hvdtrain.errors import UsageError


def _resolve(
    cli: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, file: Path | None = None, **settings: Any
) -> Config:
    return resolve("recipe.py", settings, cli or {}, env or {}, file)


def _file(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


SOURCES = ("command line", "environment", "file", "default")


@pytest.mark.parametrize(
    "given",
    [set(some) for n in range(4) for some in itertools.combinations(SOURCES[:3], n)],
    ids=lambda given: "+".join(sorted(given)),
)
def test_the_nearest_source_wins_and_is_named(tmp_path: Path, given: set[str]) -> None:
    path = _file(tmp_path, "log_every: 3" if "file" in given else "")
    config = _resolve(
        {"log_every": 1} if "command line" in given else {"log_every": None},
        {"HVDTRAIN_LOG_EVERY": "2"} if "environment" in given else {},
        path,
    )
    winner = next(source for source in SOURCES if source in given or source == "default")
    assert config.options.log_every == {"command line": 1, "environment": 2, "file": 3, "default": 10}[winner]
    assert config.origins["log_every"] == (str(path) if winner == "file" else winner)


def test_sources_are_mixed_option_by_option(tmp_path: Path) -> None:
    path = _file(tmp_path, "epochs: 7\nseed: 1\nlog-every: 3\nset:\n  hidden: 32\n  lr: 0.5\n")
    config = _resolve({"epochs": 9}, {"HVDTRAIN_SEED": "4"}, path, lr="0.1")
    assert (config.options.epochs, config.options.seed, config.options.log_every, config.options.keep) == (9, 4, 3, 3)
    assert config.settings == {"hidden": 32, "lr": "0.1"}
    assert {name: config.origins[name] for name in ("epochs", "seed", "log_every", "keep", "set.hidden", "set.lr")} == {
        "epochs": "command line",
        "seed": "environment",
        "log_every": str(path),
        "keep": "default",
        "set.hidden": str(path),
        "set.lr": "command line",
    }


def test_every_option_has_an_origin_and_a_help() -> None:
    origins = _resolve().origins
    assert set(origins) == {option.name for option in fields(Options)}
    assert set(origins.values()) == {"default"}
    assert all(option.metadata["help"].endswith(".") for option in fields(Options))


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert _resolve(env={"HVDTRAIN_EPOCHS": ""}).origins["epochs"] == "default"


def test_variables_of_the_prefix_that_are_no_option_are_left_alone() -> None:
    assert _resolve(env={"HVDTRAIN_RPATH": "/usr/lib", "HVDTRAIN_VERIFY": "x", "EPOCHS": "7"}).options == Options()


def test_a_variable_that_looks_like_a_mistyped_option_is_refused() -> None:
    with pytest.raises(UsageError, match=r"environment: there is no option 'epoch' \(did you mean 'epochs'\?\)"):
        _resolve(env={"HVDTRAIN_EPOCH": "3"})


def test_null_in_the_file_means_the_recipes_own_value(tmp_path: Path) -> None:
    assert _resolve(file=_file(tmp_path, "epochs: null")).options.epochs is None


def test_the_recipe_may_come_from_the_file(in_tmp: Path) -> None:
    Path("hvdtrain.yaml").write_text("recipe: mine.py:small\nepochs: 4")
    config = resolve(None, {}, {}, {}, None)
    assert (config.recipe, config.options.epochs) == ("mine.py:small", 4)


def test_the_default_file_is_not_read_when_a_recipe_is_given(in_tmp: Path) -> None:
    Path("hvdtrain.yaml").write_text("recipe: mine.py\nepochs: 4")
    assert resolve("other.py", {}, {}, {}, None).options.epochs is None


def test_the_recipe_on_the_command_line_wins_over_the_files(tmp_path: Path) -> None:
    config = _resolve(file=_file(tmp_path, "recipe: mine.py\nepochs: 4"))
    assert (config.recipe, config.options.epochs) == ("recipe.py", 4)


def test_without_recipe_and_file_the_user_learns_what_to_type(in_tmp: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe on the command line and no file hvdtrain.yaml in") as error:
        resolve(None, {}, {}, {}, None)
    assert error.value.hint == "hvdtrain train FILE.py, or write hvdtrain.yaml with a line: recipe: FILE.py"
    assert error.value.exit_code == 2


BAD_FILES = {
    "recipe": ("epochs: 3", None, "names no recipe"),
    "recipe that is a number": ("recipe: 5", None, "'recipe' must be a text, got 5"),
    "syntax": ("epochs: [3", "r.py", "cannot be read as YAML: .*line 1"),
    "tab": ("set:\n\tx: 1", "r.py", "cannot be read as YAML"),
    "list": ("- epochs", "r.py", "must hold key: value lines, got list"),
    "text": ("epochs", "r.py", "must hold key: value lines, got str"),
    "code": ("epochs: !!python/object/apply:os.getpid []", "r.py", "cannot be read as YAML"),
    "settings": ("set: 3", "r.py", "'set' must hold name: value lines, got 3"),
    "unknown key": ("epocs: 3", "r.py", r"my.yaml: there is no option 'epocs' \(did you mean 'epochs'\?\)"),
    "unlike anything": ("xyzzy: 3", "r.py", r"there is no option 'xyzzy'$"),
    "type": ("epochs: many", "r.py", r"my.yaml: epochs: expected int \| None, got 'many'"),
    "a number that is yes": ("epochs: yes", "r.py", r"epochs: expected int \| None, got True"),
    "a part of a step": ("log_every: 2.5", "r.py", "log_every: expected int, got 2.5"),
    "null where a value is needed": ("log_every: null", "r.py", "log_every: expected int, got None"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    text, recipe, message = BAD_FILES[name]
    with pytest.raises(UsageError) as error:
        resolve(recipe, {}, {}, {}, _file(tmp_path, text))
    assert str(tmp_path / "my.yaml") in error.value.message
    assert re.search(message, error.value.message)


@pytest.mark.parametrize("recipe", ["r.py", None])
def test_a_config_file_that_was_named_must_exist(tmp_path: Path, recipe: str | None) -> None:
    with pytest.raises(UsageError, match=r"the config file .*none.yaml does not exist"):
        resolve(recipe, {}, {}, {}, tmp_path / "none.yaml")


def test_a_folder_or_bytes_instead_of_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    for path in (tmp_path, tmp_path / "bytes.yaml"):
        with pytest.raises(UsageError, match="cannot be read"):
            _resolve(file=path)


@pytest.mark.parametrize(
    ("name", "value"),
    [(option.name, option.metadata["minimum"] - 1) for option in fields(Options) if option.metadata["minimum"] is not None],
)
@pytest.mark.parametrize("source", SOURCES[:3])
def test_values_below_their_minimum_are_refused_wherever_they_come_from(
    tmp_path: Path, name: str, value: int, source: str
) -> None:
    path = _file(tmp_path, f"{name}: {value}") if source == "file" else None
    cli = {name: value} if source == "command line" else {}
    env = {f"HVDTRAIN_{name.upper()}": str(value)} if source == "environment" else {}
    with pytest.raises(UsageError, match=f"{path or source}: {name}: must be at least {value + 1}, got {value}"):
        _resolve(cli, env, path)


def test_the_two_batch_sizes_exclude_each_other_in_one_source_and_the_stronger_source_wins_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="command line: batch_size and batch_size_per_rank exclude each other"):
        _resolve({"batch_size_per_rank": 8, "batch_size": 16}, {}, None)
    config = _resolve({"batch_size_per_rank": 8}, {}, _file(tmp_path, "batch_size: 64"))
    assert (config.options.batch_size, config.options.batch_size_per_rank) == (None, 8)
    assert (config.origins["batch_size"], config.origins["batch_size_per_rank"]) == ("default", "command line")


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    path = _file(tmp_path, "zeal: 1\nkep: 2\nlog_every: often\n")
    with pytest.raises(UsageError) as error:
        _resolve({"epochs": 0, "batch_size": 1, "batch_size_per_rank": 1}, {"HVDTRAIN_SEED": "odd"}, path)
    assert error.value.message.split("; ") == [
        f"{path}: there is no option 'kep' (did you mean 'keep'?)",
        f"{path}: there is no option 'zeal'",
        "command line: epochs: must be at least 1, got 0",
        "environment: seed: expected int | None, got 'odd'",
        f"{path}: log_every: expected int, got 'often'",
        "command line: batch_size and batch_size_per_rank exclude each other",
    ]


def test_what_was_tuned_lies_over_the_defaults_and_under_everything_else(in_tmp: Path) -> None:
    Path("c.yaml").write_text("bucket_mb: 2\n")
    environ = {"HVDTRAIN_TUNED": "exchange=horovod,bucket_mb=16,compression=none"}
    config = resolve("r.py", {}, {"compression": "bfloat16"}, environ, Path("c.yaml"))
    options, origins = config.options, config.origins
    assert (options.exchange, options.bucket_mb, options.compression) == ("horovod", 2.0, "bfloat16")
    assert [origins[name] for name in ("exchange", "bucket_mb", "compression")] == ["tuned", "c.yaml", "command line"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, 4),
        ({"compression": "bfloat16"}, 4),
        ({"compression": "powersgd:2"}, 16),
        ({"compression": "powersgd", "bucket_mb": "4"}, 4),
    ],
)
def test_buckets_are_as_large_as_the_user_says_or_as_suits_the_compression(given, wanted):
    assert resolve("r.py", {}, given, {}, None).options.exchange_wanted.bucket_mb == wanted
