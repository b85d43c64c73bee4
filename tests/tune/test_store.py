"""What is stored, under which key."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.config import Config, resolve
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Host
from hvdtrain.tune import store
from hvdtrain.tune.store import DamagedError, Tuned

HOSTS = (Host("node1", 2), Host("node2", 2))
TUNED = Tuned((("exchange", "horovod"), ("bucket", "16")), "2026-11-30 20:00", 0.8)


def config(recipe: str = "recipe.py", settings: dict[str, str] | None = None, **options: str) -> Config:
    return resolve(recipe, settings or {}, options, {}, None)


def path(config: Config, hosts: tuple[Host, ...] = HOSTS, mpi: str = "Open MPI 4.1") -> Path:
    return store.key(config, hosts, "mpi", mpi).path({"HOME": "/home/a"})


@pytest.fixture
def _recipe(in_tmp: Path) -> None:
    Path("recipe.py").write_text("one")


@pytest.mark.usefixtures("_recipe")
def test_the_key_has_all_that_a_step_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first = path(config())
    assert first.parent == Path("/home/a/.cache/hvdtrain/tuned")
    others = [
        path(config("recipe.py:other")),
        path(config(settings={"hidden": "3"})),
        path(config(batch_size="32")),
        path(config(), HOSTS[:1]),
        path(config(), (Host("node1", 2), Host("node2", 1))),
        path(config(), mpi="Open MPI 5.0"),
        path(config(exchange="horovod")),
        path(config(compression="bfloat16")),
        path(config(bucket_mb="16")),
    ]
    monkeypatch.setattr(store.resources, "affinity", lambda: 1)
    monkeypatch.setattr(store.resources, "usable_cpus", lambda affinity: affinity + 1000)
    others.append(path(config()))
    Path("recipe.py").write_text("two")
    others.append(path(config()))
    assert len({first, *others}) == len(others) + 1


@pytest.mark.usefixtures("_recipe")
def test_the_key_has_nothing_that_a_step_does_not_hang_on() -> None:
    same = [
        config(),
        config("recipe.py:recipe"),
        config(epochs="3", run_dir="runs/x"),
        resolve("recipe.py", {}, {}, {"HVDTRAIN_TUNED": "exchange=horovod,bucket_mb=16"}, None),
        config("recipe:recipe"),
    ]
    assert len({path(each) for each in same}) == 1


@pytest.mark.usefixtures("_recipe")
def test_this_machine_has_one_name_in_the_key_and_machines_that_share_a_home_have_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def here(name: str) -> Path:
        return path(config(), (Host(name, 2),))

    assert here("localhost") == here("127.0.0.1") == here(os.uname().nodename)
    before = here("localhost")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    assert here("localhost") == here("another") != before


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tuned" / "key.json"
    assert store.read(file) is None
    store.write(file, TUNED, {"made_of": {"hosts": 1}})
    assert store.read(file) == TUNED
    assert [each.name for each in file.parent.iterdir()] == ["key.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"hvdtrain_tuned": 1}', '{"hvdtrain_tuned": 1, "settings": [["x", "1"]], "date": "", "ratio": 1}', "\0"],
)
def test_a_damaged_file_is_told_of(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(text)
    with pytest.raises(DamagedError, match=r"key\.json is damaged") as caught:
        store.read(file)
    assert "hvdtrain tune" in caught.value.hint


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": [["exchange", "rubbish"]]},
        {"settings": [["threads", "-5"]]},
        {"settings": [["threads", "0"]]},
        {"settings": [["cycle", "abc"]]},
        {"settings": [["bucket", "16; rm"]]},
        {"settings": [["bucket", "16,seed=3"]]},
        {"settings": [["compression", "none"]]},
        {"settings": [["mpi", ""]]},
        {"ratio": "nan"},
        {"ratio": 0},
        {"ratio": 1.5},
        {"ratio": 10**400},
        {"date": "2026\nrm -r x"},
    ],
)
def test_values_that_no_search_finds_are_damage(damage: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    store.write(file, TUNED, damage)
    with pytest.raises(DamagedError, match=r"key\.json is damaged .*: the defaults are used"):
        store.read(file)


def test_a_file_of_another_format_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "key.json").write_text('{"hvdtrain_tuned": 0}')
    assert store.read(tmp_path / "key.json") is None


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HvdtrainError, match="cannot be stored"):
        store.write(tmp_path / "file" / "key.json", TUNED, {})
    with pytest.raises(HvdtrainError, match="cannot be stored"):
        store.check(tmp_path / "file" / "key.json")


def test_a_check_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    store.check(tmp_path / "tuned" / "key.json")
    assert list((tmp_path / "tuned").iterdir()) == []
