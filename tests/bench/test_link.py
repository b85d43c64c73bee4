from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from hvdtrain.bench import results
from hvdtrain.bench.link import slow, tournament
from hvdtrain.bench.results import Link
from tests.bench.examples import routes
from tests.support.hosts import emulated

FAST, SLOW = 1e9, 1e8


@pytest.mark.parametrize("count", range(2, 12))
def test_each_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(count: int):
    rounds = list(tournament(count))
    assert len(rounds) == count - 1 + count % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))


def between(hosts: str, slow_ones: set[str]) -> dict[tuple[str, str], float]:
    """``slow_ones``: "c>" for what c sends, ">c" for what it receives, "ab" for the route from a to b."""
    return {(a, b): SLOW if {f"{a}>", f">{b}", f"{a}{b}"} & slow_ones else FAST for a, b in itertools.permutations(hosts, 2)}


@pytest.mark.parametrize(
    ("hosts", "slow_ones", "named"),
    [
        ("abc", set(), []),
        ("abc", {"c>"}, [("c", "sends")]),
        ("abc", {">c"}, [("c", "receives")]),
        ("abcd", {"c>", ">c"}, [("c", "sends and receives")]),
        ("abc", {"ab"}, [("a -> b", "route")]),
        ("abcde", {"ab", "ba", "d>"}, [("d", "sends"), ("a -> b", "route"), ("b -> a", "route")]),
        ("ab", {"ab"}, [("a -> b", "route")]),
        ("ab", {"ab", "ba"}, []),
    ],
)
def test_the_slow_host_or_route_is_named_and_no_other(hosts: str, slow_ones: set[str], named: list[tuple[str, str]]):
    found = slow(routes(between(hosts, slow_ones)))
    assert [(each.what, each.how) for each in found] == named
    assert all((each.bytes_per_s, each.usual_bytes_per_s) == (SLOW, FAST) for each in found)


@pytest.mark.ranks
def test_a_host_with_a_slow_cable_is_named(tmp_path: Path):
    with emulated(3) as cluster:
        # The others too, or the noise of a busy machine would be as large as what is looked for.
        for host, rate in (("node1", "400mbit"), ("node2", "400mbit"), ("node3", "100mbit")):
            cluster("exec", host, "--", *f"tc qdisc add dev eth0 root tbf rate {rate} burst 128kb latency 10ms".split())
        words = [
            sys.executable,
            "-m",
            "hvdtrain",
            "bench",
            "link",
            "-H",
            "node1:2,node2,node3",
            "--json",
            str(tmp_path / "found.json"),
        ]
        done = cluster.run("node1", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        report = results.read(tmp_path / "found.json")
        assert isinstance(report, Link)
        assert sorted(report.setup.hosts) == ["node1", "node2", "node3"]
        assert {(route.source, route.target) for route in report.routes} == set(itertools.permutations(report.setup.hosts, 2))
        assert (report.slow[0].what, report.slow[0].how) == ("node3", "sends")  # a busy machine may add others
        assert report.slow[0].bytes_per_s == pytest.approx(100e6 / 8 * 1448 / 1514, rel=0.25)
        assert "node3 sends slowly" in done.stdout
        assert not cluster.left(5)
