"""The cache never gives a damaged wheel, never holds half of one, and serves one process at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.cache import Cache, cache_folder, cache_key, lock


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"PK" + bytes(1000))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_what_is_stored_is_found(cache: Cache, wheel: Path) -> None:
    assert cache.find("k") is None
    stored = cache.store("k", wheel, {"horovod": "0.28.1"})
    assert cache.find("k") == stored
    assert stored.read_bytes() == wheel.read_bytes()
    assert cache.find("another") is None


@pytest.mark.parametrize("damage", ["flip", "cut", "no-record", "bad-record", "no-wheel"])
def test_a_damaged_wheel_is_removed_and_not_given(cache: Cache, wheel: Path, damage: str) -> None:
    stored = cache.store("k", wheel, {})
    record = stored.parent / "record.json"
    if damage == "flip":
        stored.write_bytes(b"PX" + bytes(1000))
    elif damage == "cut":
        stored.write_bytes(b"PK")
    elif damage == "no-record":
        record.unlink()
    elif damage == "bad-record":
        record.write_text("[")
    else:
        stored.unlink()
    assert cache.find("k") is None
    assert not stored.parent.exists()
    assert cache.store("k", wheel, {}) == cache.find("k")


def test_a_failed_store_leaves_nothing(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cache.store("k", tmp_path / "missing.whl", {})
    assert list((cache.folder / "wheels").iterdir()) == []


def test_clearing_tells_how_much_went(cache: Cache, wheel: Path) -> None:
    cache.store("k", wheel, {})
    assert cache.clear() > 1000
    assert cache.find("k") is None
    assert cache.clear() == 0


def test_a_cache_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HvdtrainError, match="XDG_CACHE_HOME"):
        Cache(tmp_path / "file" / "cache").make("wheels")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/hvdtrain/horovod"),
        ({"HOME": "/h"}, "/h/.cache/hvdtrain/horovod"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hvdtrain/horovod"),
    ],
)
def test_cache_folder(environ: dict[str, str], expected: str) -> None:
    assert cache_folder(environ) == Path(expected)


def test_the_key_does_not_depend_on_the_order() -> None:
    assert cache_key({"a": 1, "b": [2]}) == cache_key({"b": [2], "a": 1})


_HOLDER = """
import sys, time
from pathlib import Path
from hvdtrain.horovod.cache import lock
with lock(Path(sys.argv[1]), lambda holder: print("waits for", holder, flush=True)):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_the_second_process_waits_and_a_killed_holder_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "k"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path), "60"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    second = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path), "0"], stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    assert second.stdout.readline() == f"waits for {holder.pid}\n"
    time.sleep(0.2)
    assert second.poll() is None
    holder.kill()
    assert second.communicate(timeout=20)[0] == "holds\n"
    holder.communicate()
    with lock(path, lambda _: pytest.fail("nobody holds it")):
        pass
