from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hvdtrain.bench import plots
from hvdtrain.errors import UsageError
from tests.bench.examples import ALLREDUCE, sums

SVG = "{http://www.w3.org/2000/svg}"


def test_the_plot_has_a_line_for_each_carrier_and_the_limit():
    root = ElementTree.fromstring(plots.bandwidth(ALLREDUCE))
    assert len(root.findall(f"{SVG}polyline")) == 3
    told = [title.text for title in root.iter(f"{SVG}title")]
    assert "mpi, 1 MiB: 1.33 GB/s" in told
    assert "limit, 1 MiB: 1.4 GB/s" in told
    faster = [float(circle.get("cy") or 0) for circle in root.iter(f"{SVG}circle")]
    assert faster[2] < faster[0]  # shared is above mpi


def test_one_point_can_be_drawn():
    ElementTree.fromstring(plots.bandwidth(replace(ALLREDUCE, sums=sums("mpi", 1e9)[:1], limits=(), carriers={"mpi": "MPI"})))


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be written"):
        plots.write(tmp_path / "no" / "plot.svg", "")
