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


#: Tests that share something, by file: the emulated hosts of this machine, or jobs that several tests look at.
_GROUPS = {"test_cluster": "hosts", "test_slurm": "hosts", "test_exact": "exact"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``--dist loadgroup`` run what shares something in one process, one after the other, longest groups first."""
    for item in items:
        if group := _GROUPS.get(item.path.stem):
            item.add_marker(pytest.mark.xdist_group(group))
    order = list(_GROUPS.values())
    items.sort(key=lambda item: order.index(group) if (group := _GROUPS.get(item.path.stem)) else len(order))
