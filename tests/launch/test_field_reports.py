"""The table of reports names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_report_has_a_test() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (HERE / "field_reports.md").read_text(encoding="utf-8"))
    rows = [
        line for line in (HERE / "field_reports.md").read_text(encoding="utf-8").splitlines() if re.match(r"\| \w.*#\d", line)
    ]
    assert len(named) == len(rows) > 30
    missing = [name for file, name in named if f"def {name}(" not in (HERE / file).read_text(encoding="utf-8")]
    assert missing == []
