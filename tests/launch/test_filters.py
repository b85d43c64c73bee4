"""Leaving hosts and slots out."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, filters, fit

HOSTS = (Host("node1", 4), Host("node2", 4), Host("node3", 2))

FILTERS = {
    "nothing": ((), (), HOSTS),
    "one host": (("node2",), (), (Host("node2", 4),)),
    "a range": (("node[2-3]",), (), (Host("node2", 4), Host("node3", 2))),
    "slots are devices": (("node1:1,3",), (), (Host("node1", 2, devices=(1, 3)),)),
    "a range of slots": (("node1:0-2",), (), (Host("node1", 3, devices=(0, 1, 2)),)),
    "several": (("node1:0", "node3"), (), (Host("node1", 1, devices=(0,)), Host("node3", 2))),
    "without a host": ((), ("node1",), (Host("node2", 4), Host("node3", 2))),
    "without a slot": ((), ("node2:0",), (Host("node1", 4), Host("node2", 3, devices=(1, 2, 3)), Host("node3", 2))),
    "both": (("node[1-2]",), ("node1:0-2",), (Host("node1", 1, devices=(3,)), Host("node2", 4))),
}


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_left(name: str) -> None:
    include, exclude, expected = FILTERS[name]
    assert filters.apply(HOSTS, include, exclude) == expected


REFUSED = {
    "unknown host": (("node9",), (), "--include node9: there is no host 'node9'"),
    "unknown slot": ((), ("node3:2",), "--exclude node3:2: node3 has slots 0 to 1, not 2"),
    "no number": (("node3:x",), (), "--include node3:x: 'x' is not a slot or a range of slots"),
    "bad range": (("node[1-",), (), "--include node[1-: '[' without ']'"),
    "backwards": (("node1:3-1",), (), "--include node1:3-1: the range '3-1' runs backwards"),
    "nothing left": (("node1",), ("node1",), "--include and --exclude leave no slot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_filter_that_matches_nothing_is_a_mistake(name: str) -> None:
    include, exclude, message = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        filters.apply(HOSTS, include, exclude)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_fewer_ranks_keep_the_first_devices() -> None:
    left = filters.apply(HOSTS, ("node1:1,3", "node2"), ())
    assert fit(left, 3, source="hosts") == (Host("node1", 2, devices=(1, 3)), Host("node2", 1))
    assert fit(left, 1, source="hosts") == (Host("node1", 1, devices=(1,)),)


def test_ipv6_is_named_in_brackets() -> None:
    hosts = (Host("fd00::1", 2), Host("b", 2))
    for item in ("[fd00::1]:1", "[FD00:0::1]:1"):
        assert filters.apply(hosts, (item,), ()) == (Host("fd00::1", 1, devices=(1,)),)


def test_this_machine_answers_to_all_its_names() -> None:
    assert filters.apply((Host("localhost", 2), Host("b", 2)), (), ("127.0.0.1",)) == (Host("b", 2),)


def test_what_gets_no_rank_is_told() -> None:
    used = fit(filters.apply(HOSTS, (), ("node1:0",)), 5, source="hosts")
    assert filters.unused(HOSTS, used) == {"node1": 1, "node2": 2, "node3": 2}
    assert filters.unused_text(HOSTS, used) == "not used: 1 of 4 slots of node1, 2 of 4 slots of node2, node3"
    assert filters.unused_text(HOSTS, HOSTS) == ""
    many = tuple(Host(f"n{number}") for number in range(20))
    assert filters.unused_text(many, many[:2]).endswith("n8, n9 and 10 more hosts")


def test_slots_are_not_written_out_one_by_one() -> None:
    hosts = (Host("a", 10**9), Host("b", 10**9))
    assert filters.apply(hosts, (), ()) == hosts
    assert filters.apply(hosts, ("a", "b"), ("a",)) == hosts[1:]
