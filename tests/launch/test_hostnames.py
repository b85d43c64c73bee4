"""What a host may be called: RFC 1123, and the two decisions beside it."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import hostnames

GOOD = [
    "a",
    "A1",
    "1a",
    "3com.com",
    "node-01",
    "my_app_1",
    "a.b-c.d",
    "n1.127x",
    "10.0.0.1",
    "127.0.0.2",
    "x" * 63,
    "a." * 126 + "a",
]


@pytest.mark.parametrize("name", GOOD)
def test_a_host_name_is_taken_as_it_is(name: str) -> None:
    assert hostnames.check(name) == name


BAD = {
    "": "the host name is empty",
    "-a": "host name '-a' begins with '-'",
    "a-": "host name 'a-' has '-' at the end",
    "a.": "host name 'a.' has a dot too many",
    ".a": "host name '.a' has a dot too many",
    "a..b": "host name 'a..b' has a dot too many",
    "a.-b": "host name 'a.-b' has '-' at the beginning",
    "a-.b": "host name 'a-.b' has '-' at the end",
    "_a": "host name '_a' has '_' at the beginning",
    "a_": "host name 'a_' has '_' at the end",
    "a b": "host name 'a b' contains ' '",
    "x" * 64: f"host name '{'x' * 64}' has a part of more than 63 characters",
    "a." * 127 + "a": "is longer than 253 characters",
    "127.1": "'127.1' ends in a number",
    "4": "'4' ends in a number",
    "1.2.3.256": "'1.2.3.256' ends in a number",
    "10.0.0.01": "'10.0.0.01' ends in a number",
    "1.2.3.4.5": "'1.2.3.4.5' ends in a number",
    "node.7": "'node.7' ends in a number",
    "0x7f000001": "'0x7f000001' ends in a number",
    "127.0.0.0x1": "'127.0.0.0x1' ends in a number",
    "0.0.0.0": "no IPv4 address of a host",
    "224.0.0.1": "no IPv4 address of a host",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_host_name_says_why(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        hostnames.check(name)
    assert BAD[name] in caught.value.message
    assert caught.value.hint


def test_names_of_one_machine_are_told_without_a_resolver() -> None:
    here = ["localhost", "LocalHost", "127.0.0.1", "127.3.2.1", "::1"]
    assert {hostnames.machine(name) for name in here} == {"localhost"}
    others = ["Node1", "127.example.org", "10.0.0.1", "fd00::1", "localhost.example.org"]
    assert [hostnames.machine(name) for name in others] == [name.lower() for name in others]
