"""Writing hosts down in each dialect."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, dialects
from hvdtrain.launch.hostfile import parse


@pytest.mark.parametrize("lines", [2, 64])
def test_a_hostfile_of_many_lines_becomes_the_exact_horovodrun_list(lines: int) -> None:
    parsed = parse("".join(f"h{number} slots=8\n" for number in range(lines)))
    assert dialects.render(parsed.hosts, "horovod") == ",".join(f"h{number}:8" for number in range(lines)) + "\n"
    assert sum(host.slots for host in parsed.hosts) == 8 * lines


def test_a_dialect_refuses_what_it_cannot_say() -> None:
    with pytest.raises(UsageError, match="the mpich dialect cannot say port"):
        dialects.render([Host("a", 2, port=22)], "mpich")
    with pytest.raises(UsageError, match="the openmpi dialect cannot say IPv6"):
        dialects.render([Host("::1", 2)], "openmpi")


RENDERED = {
    "hvdtrain": "al@n01 slots=2 max_slots=4 port=22\n[fd00::1] slots=1\n",
    "ranges": "al@n01 slots=2 max_slots=4 port=22\n[fd00::1] slots=1\n",
}


@pytest.mark.parametrize("dialect", RENDERED)
def test_rendering_keeps_every_detail(dialect: str) -> None:
    hosts = (Host("n01", 2, "al", 22, 4), Host("fd00::1", 1))
    assert dialects.render(hosts, dialect) == RENDERED[dialect]
    assert parse(RENDERED[dialect]).hosts == hosts


def test_ten_thousand_hosts_as_ranges_are_one_line() -> None:
    hosts = tuple(Host(f"node{number:05}", 8) for number in range(10_000))
    assert dialects.render(hosts, "ranges") == "node[00000-09999] slots=8\n"
    assert parse(dialects.render(hosts, "ranges")).hosts == hosts
