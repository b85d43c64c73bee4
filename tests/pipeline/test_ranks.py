"""Random pipelines on real ranks."""

from __future__ import annotations

import pytest

from tests.support.harness import run_module


@pytest.mark.ranks
def test_200_random_pipelines_come_to_their_end_with_the_weights_of_one_process(tmp_path):
    run_module("tests.pipeline.random_ranks", 4, tmp_path, "200", timeout=300)
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(4)] == ["200"] * 4
