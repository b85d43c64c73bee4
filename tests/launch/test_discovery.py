from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import discovery


def script(folder: Path, text: str) -> str:
    path = folder / "find hosts.sh"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("#!/bin/sh\necho node1:2\necho\necho node2:1\n", []),
        ("echo node1:3  # a shell's script without a first line\n", []),
        ("#!/bin/sh\n", ["the host discovery script names 0 slots now; the job begins with 3"]),
    ],
)
def test_hosts_may_come_later(tmp_path: Path, text: str, warning: list[str]):
    assert discovery.warnings(script(tmp_path, text), 3, tmp_path) == warning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\necho 'no such queue' >&2\nexit 3\n", r"find hosts.sh ends with exit code 3: no such queue"),
        ("#!/bin/sh\necho node1:0\n", "line 1 of what it prints: it is no host:slots: 'node1:0'"),
        ("#!/bin/sh\necho node1\n", "line 1 of what it prints: it is no host:slots: 'node1'"),
        ("#!/bin/sh\necho node1:1\necho 'a b:1'\n", "line 2 of what it prints: host name 'a b'"),
        ("#!/no/such/shell\n", "ends with exit code 12[67]"),
    ],
)
def test_a_script_that_cannot_be_used_is_told_before_the_start(tmp_path: Path, text: str, message: str):
    with pytest.raises(UsageError, match=message):
        discovery.warnings(script(tmp_path, text), 1, tmp_path)
