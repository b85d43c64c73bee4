"""Network interfaces: a subnet that all hosts share, no container bridges."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import nics, this_host
from hvdtrain.launch.nics import Interface, Network, choose

LO = Interface("lo", ("127.0.0.1/8", "::1/128"), loopback=True)
DOCKER = Interface("docker0", ("172.17.0.1/16",))
VIRBR = Interface("virbr0", ("192.168.122.1/24",))
DOWN = Interface("eth9", ("10.0.0.9/24",), up=False)


def eth(number: int, address: str, speed: int = 1000) -> Interface:
    return Interface(f"eth{number}", (address,), speed=speed)


CASES: dict[str, tuple[dict[str, list[Interface]], tuple[str, ...], str, str]] = {
    "the common one": (
        {"a": [LO, DOCKER, eth(0, "10.0.0.1/24")], "b": [LO, DOCKER, eth(0, "10.0.0.2/24")]},
        ("eth0",),
        "10.0.0.0/24",
        "eth0, in the subnet 10.0.0.0/24 of all 2 hosts; not used: lo: loopback, docker0: made by container software",
    ),
    "only the second network is common": (
        {"a": [eth(0, "10.1.0.1/24"), eth(1, "10.9.0.1/24")], "b": [eth(0, "10.2.0.1/24"), eth(1, "10.9.0.2/24")]},
        ("eth1",),
        "10.9.0.0/24",
        "eth1, in the subnet 10.9.0.0/24 of all 2 hosts",
    ),
    "the faster of two": (
        {
            "a": [eth(0, "10.0.0.1/24", 1000), eth(1, "10.9.0.1/24", 100000)],
            "b": [eth(0, "10.0.0.2/24", 1000), eth(1, "10.9.0.2/24", 100000)],
        },
        ("eth1",),
        "10.9.0.0/24",
        "eth1, in the subnet 10.9.0.0/24 of all 2 hosts",
    ),
    "other names, one subnet": (
        {"a": [eth(0, "10.0.0.1/24")], "b": [Interface("ens3", ("10.0.0.2/24",))]},
        ("eth0", "ens3"),
        "10.0.0.0/24",
        "eth0/ens3, in the subnet 10.0.0.0/24 of all 2 hosts",
    ),
    "what is down does not count": (
        {"a": [DOWN, VIRBR, eth(0, "10.5.0.1/24")], "b": [eth(0, "10.5.0.2/24"), eth(1, "10.0.0.2/24")]},
        ("eth0",),
        "10.5.0.0/24",
        "eth0, in the subnet 10.5.0.0/24 of all 2 hosts; not used: eth9: down, virbr0: made by container software",
    ),
    "bridges alone are nothing": (
        {"a": [DOCKER], "b": [DOCKER]},
        (),
        "",
        "no subnet is common to all hosts (a: docker0 (172.17.0.1/16); b: docker0 (172.17.0.1/16))",
    ),
    "routed networks": (
        {"a": [eth(0, "10.1.0.1/24")], "b": [eth(0, "10.2.0.1/24")]},
        (),
        "",
        "no subnet is common to all hosts (a: eth0 (10.1.0.1/24); b: eth0 (10.2.0.1/24))",
    ),
    "ipv6 only": (
        {"a": [Interface("eth0", ("fd00::1/64", "fe80::1/64"))], "b": [Interface("eth0", ("fd00::2/64", "fe80::2/64"))]},
        ("eth0",),
        "fd00::/64",
        "eth0, in the subnet fd00::/64 of all 2 hosts",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_interface_and_the_reason(name: str) -> None:
    tables, names, subnet, reason = CASES[name]
    assert choose(tables) == Network(names, subnet, reason)


def test_a_wrong_name_lists_the_real_ones() -> None:
    tables = {"a": [eth(0, "10.0.0.1/24")], "b": [LO, Interface("ens3", ("10.0.0.2/24",)), DOWN]}
    with pytest.raises(UsageError) as caught:
        nics.check(["eth0"], tables)
    assert str(caught.value) == (
        "b has no network interface 'eth0'\nHint: b has lo (127.0.0.1/8, ::1/128), ens3 (10.0.0.2/24), eth9 (10.0.0.9/24, down)"
    )
    assert nics.check(["eth0", "ens3"], tables).names == ("eth0", "ens3")


WRONG = {
    "not on any host": (
        ["eth0", "nosuch0"],
        "a, b have no network interface 'nosuch0'",
        "a has eth0 (10.0.0.1/24); b has eth0",
    ),
    "an option": (["-x"], "--nic '-x' cannot be the name of a network interface", "--nic eth0"),
    "two in one": (["eth0,eth1"], "--nic 'eth0,eth1' cannot be", "--nic eth0"),
    "too long": (["abcdefghijklmnop"], "cannot be the name", "--nic eth0"),
    "empty": ([""], "--nic '' cannot be the name", "--nic eth0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_given_name_is_checked(case: str) -> None:
    wanted, message, hint = WRONG[case]
    with pytest.raises(UsageError) as caught:
        nics.check(wanted, {"a": [eth(0, "10.0.0.1/24")], "b": [eth(0, "10.0.0.2/24")]})
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_interface_that_is_down_is_a_warning() -> None:
    assert nics.check(["eth9"], {"a": [eth(0, "10.0.0.1/24"), DOWN]}).warnings == ("eth9 is down on a",)


def test_where_not_all_hosts_were_asked_a_missing_one_is_a_warning() -> None:
    """A login node's interfaces need not be those of the compute nodes."""
    chosen = nics.check(["ib0"], {"this machine": [eth(0, "10.0.0.1/24")]}, complete=False)
    assert chosen.names == ("ib0",)
    assert chosen.warnings == (
        "this machine has no network interface 'ib0', and the other hosts were not asked (this machine has eth0 (10.0.0.1/24))",
    )


def test_this_machines_interfaces_come_from_the_kernel() -> None:
    found = {each.name: each for each in this_host.interfaces()}
    assert found["lo"].loopback
    assert "127.0.0.1/8" in found["lo"].addresses
    assert "127.0.0.1" in this_host.own_addresses()


def test_a_subnet_in_which_two_hosts_have_one_address_is_not_common() -> None:
    """A virtual machine's private network looks the same on every host, and leads to none."""
    tables = {
        host: [Interface("eth0", ("10.0.2.15/24",)), Interface("eth1", (f"192.168.56.{number}/24",))]
        for number, host in ((10, "a"), (11, "b"))
    }
    assert choose(tables).names == ("eth1",)


def test_of_two_interfaces_in_one_subnet_the_faster_is_taken() -> None:
    tables = {
        host: [
            Interface("fast", (f"10.0.0.{number}/24",), speed=100_000),
            Interface("slow", (f"10.0.0.{number + 100}/24",), speed=1000),
        ]
        for number, host in ((10, "a"), (11, "b"))
    }
    assert choose(tables).names == ("fast",)
