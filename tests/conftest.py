"""What every test sees: an environment without a launcher's variables, in a directory of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI", "SLURM_", "HVDTRAIN_", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
