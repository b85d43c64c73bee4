"""``require``, and the records it reads."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import horovod
from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import buildinfo
from hvdtrain.horovod.buildinfo import BuildInfo, installed_version, mismatch, read_build_info


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Horovod built for torch 2.13.0 and nothing else, beside torch 2.13.0 and TensorFlow 2.21.0."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").write_text("")
    info = BuildInfo("0.28.1", {"torch": "2.13.0+cpu"}, key="k")
    (tmp_path / buildinfo.FILE_NAME).write_text(info.to_json())
    monkeypatch.setattr(buildinfo, "package_folder", lambda: tmp_path)
    installed = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
    monkeypatch.setattr(buildinfo, "installed_version", installed.get)
    return tmp_path


def test_require_accepts_what_it_was_built_for(package: Path) -> None:
    horovod.require("torch")


def test_require_refuses_a_framework_it_was_not_built_for(package: Path) -> None:
    with pytest.raises(HvdtrainError, match=r"not built for tensorflow 2\.21\.0") as error:
        horovod.require("tensorflow")
    assert error.value.hint == "hvdtrain horovod install"


def test_require_refuses_another_version(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildinfo, "installed_version", {"torch": "2.14.1"}.get)
    with pytest.raises(HvdtrainError, match=r"built for torch 2\.13\.0\+cpu, but 2\.14\.1 is installed"):
        horovod.require("torch")


def test_require_refuses_a_lost_extension(package: Path) -> None:
    next((package / "torch").glob("*.so")).unlink()
    with pytest.raises(HvdtrainError, match="extension for torch is missing"):
        horovod.require("torch")


def test_require_refuses_when_there_is_no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildinfo, "package_folder", lambda: None)
    with pytest.raises(HvdtrainError, match="not installed") as error:
        horovod.require("torch")
    assert error.value.hint == "hvdtrain horovod install"


def test_require_says_to_install_a_missing_framework(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildinfo, "installed_version", {}.get)
    with pytest.raises(HvdtrainError, match="not installed") as error:
        horovod.require("torch")
    assert error.value.hint.startswith("install torch")


def test_another_tools_build_is_judged_by_horovods_own_records(package: Path) -> None:
    (package / buildinfo.FILE_NAME).unlink()
    (package / "metadata.json").write_text(json.dumps({"pytorch": "2.13.0", "dummy": "none"}))
    info = read_build_info(package)
    assert (info.ours, dict(info.frameworks)) == (False, {"torch": "2.13.0"})
    horovod.require("torch")
    with pytest.raises(HvdtrainError, match="not built for tensorflow"):
        horovod.require("tensorflow")


def test_another_tools_build_without_records_passes_if_its_extension_is_there(package: Path) -> None:
    (package / buildinfo.FILE_NAME).unlink()
    horovod.require("torch")
    with pytest.raises(HvdtrainError):
        horovod.require("tensorflow")


def test_records_of_a_newer_build_can_be_read() -> None:
    text = json.dumps({"horovod": "0.28.1", "frameworks": {}, "invented_later": 1, "changes": ["a"]})
    assert BuildInfo.from_json(text).changes == ("a",)


@pytest.mark.parametrize(
    ("built", "installed", "said"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", ""),
        ("2.13.0", "2.13.0+cpu", ""),
        ("2.13.0+cpu", "2.13.0+cu130", "but 2.13.0+cu130 is installed"),
        ("2.13.0", "2.13.1", "built for torch 2.13.0, but 2.13.1 is installed"),
        ("2.13.0", None, "built for torch 2.13.0, which is not installed"),
        (None, "2.13.0", "not built for torch 2.13.0"),
        (None, None, "torch is not installed"),
    ],
)
def test_mismatch(built: str | None, installed: str | None, said: str) -> None:
    found = mismatch(BuildInfo("0.28.1", {"torch": built} if built else {}), "torch", installed)
    assert found == "" if said == "" else said in found


def test_tensorflow_is_found_under_its_other_names() -> None:
    def version_of(name: str) -> str:
        if name == "tensorflow-cpu":
            return "2.21.0"
        raise importlib.metadata.PackageNotFoundError(name)

    assert installed_version("tensorflow", version_of) == "2.21.0"
    assert installed_version("torch", version_of) is None


def test_importing_and_requiring_loads_no_framework() -> None:
    script = (
        "import sys, hvdtrain.horovod as h\n"
        "try: h.require('torch')\nexcept h.HvdtrainError: pass\n"
        "print([name for name in ('torch', 'tensorflow', 'horovod', 'mpi4py', 'click', 'rich') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
