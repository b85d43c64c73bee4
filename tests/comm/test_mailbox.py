"""Messages between ranks."""

from __future__ import annotations

import pytest

from tests.support.harness import run_module


@pytest.mark.ranks
def test_messages_of_any_shape_and_size_go_both_ways_at_once_and_in_order(tmp_path):
    run_module("tests.comm.mailbox_ranks", 2, tmp_path, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]
