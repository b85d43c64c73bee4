"""Properties of the hostfile parser, over generated and over damaged files."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, allocation, dialects, hostfile, hostnames
from hvdtrain.launch.dialects import DIALECTS
from hvdtrain.launch.hostfile import HostfileError, parse

DOCUMENTED_NAME = re.compile(
    r"(?!.{254})[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*"
)
DOCUMENTED_IPV6 = re.compile(r"[0-9a-f:.]+")
IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")

names = st.one_of(
    st.from_regex(r"[a-z]([a-z0-9_-]{0,8}[a-z0-9])?(\.[a-z]([a-z0-9_-]{0,8}[a-z0-9])?){0,2}", fullmatch=True),
    st.builds(
        lambda stem, number, width: f"{stem}{number:0{width}}",
        st.sampled_from(["n", "gpu-", "r1n"]),
        st.integers(0, 120),
        st.integers(1, 4),
    ),
    st.ip_addresses(v=4).filter(lambda address: not address.is_multicast and not address.is_unspecified).map(str),
)
ipv6 = (
    st.ip_addresses(v=6)
    .filter(lambda address: not address.is_multicast and not address.is_unspecified and address.ipv4_mapped is None)
    .map(str)
)


@st.composite
def host_lists(draw: st.DrawFn, dialect: str) -> tuple[Host, ...]:
    can_say = DIALECTS[dialect].can_say
    name = st.one_of(names, ipv6) if "IPv6" in can_say else names
    listed = draw(st.lists(name, min_size=1, max_size=12, unique_by=hostnames.machine))
    hosts = []
    for each in listed:
        slots = draw(st.integers(1, 64))
        host = Host(each, slots)
        if "user" in can_say and draw(st.booleans()):
            host = replace(host, user=draw(st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True)))
        if "port" in can_say and draw(st.booleans()):
            host = replace(host, port=draw(st.integers(1, 65535)))
        if "max_slots" in can_say and draw(st.booleans()):
            host = replace(host, max_slots=slots + draw(st.integers(0, 9)))
        hosts.append(host)
    return tuple(hosts)


def read_back(text: str, dialect: str) -> tuple[Host, ...]:
    if dialect == "horovod":
        return hostfile.parse_option(text.strip()).hosts
    if dialect == "slurm":
        found = allocation.from_environment(dict(line.split("=", 1) for line in text.splitlines()))
        assert found is not None
        return found.hosts
    return parse(text).hosts


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_render_then_parse_is_the_identity(dialect: str, data: st.DataObject) -> None:
    hosts = data.draw(host_lists(dialect))
    assert read_back(dialects.render(hosts, dialect), dialect) == hosts


@settings(max_examples=100, deadline=None)
@given(hosts=host_lists("hvdtrain"), data=st.data())
def test_blanks_comments_and_line_ends_change_nothing(hosts: tuple[Host, ...], data: st.DataObject) -> None:
    text = ""
    for line in dialects.render(hosts, "hvdtrain").splitlines():
        text += data.draw(st.sampled_from(["", "\n", "# c\n", "// c slots=x\r\n", " \t\r\n"]))
        text += data.draw(st.sampled_from(["", " ", "\t"])) + line.replace(" ", data.draw(st.sampled_from([" ", "\t", "   "])))
        text += data.draw(st.sampled_from(["", " ", " # slots=0", "\t//x"])) + data.draw(st.sampled_from(["\n", "\r\n"]))
    assert parse(text).hosts == hosts
    assert parse(text.rstrip("\r\n")).hosts == hosts


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_is_a_value_or_an_error_with_lines(text: str) -> None:
    check(text)


def check(text: str) -> bool:
    """The promise about any text at all; whether it was accepted."""
    try:
        parsed = parse(text)
    except HostfileError as error:
        caught = error
    else:
        assert parsed.hosts
        for host in parsed.hosts:
            assert (DOCUMENTED_IPV6 if host.is_ipv6 else DOCUMENTED_NAME).fullmatch(host.name), host
            assert IPV4.fullmatch(host.name) or not host.name.rpartition(".")[2].isdigit(), host
            assert host.slots >= 1
        assert len({hostnames.machine(host.name) for host in parsed.hosts}) == len(parsed.hosts)
        return True
    lines = len(re.split(r"\r\n|\r|\n", text))
    assert caught.mistakes
    assert all(1 <= mistake.line <= lines or "no host in it" in mistake.problem for mistake in caught.mistakes)
    assert caught.hint
    assert str(caught).replace("\n", "").isprintable()
    return False


SEEDS = [
    "node01 slots=4 max_slots=8\nnode02 slots=2\n# comment\n\n[fd00::1]:3\n",
    "alice@node03 slots = 2 port=2222 // trailing\r\nnode[05-08,11]:4\r\n",
    "a:2,b:2\nhostA 2 hostB 4\n",
    "n1\nn1\nn2\n",
    "r[1-2]n[01-02].x.svc:1\n10.0.0.1:2\tusername\n",
]
ALPHABET = "abn019[]{}(),:;=@#/\\-_.%$`'\"|&<>*?!~^ \t\r\n\x00\x1b\u00e9\u0661\u202e\ufeff\U0001f600"
PIECES = [
    "slots=",
    "max_slots=",
    "port=",
    "user=",
    "[1-3]",
    "[fd00::1]",
    "-o",
    "@",
    "//",
    "#",
    "0",
    "-1",
    "99999999999999999999",
    ",,",
    "::",
]


def mutate(source: random.Random, text: str) -> str:
    for _ in range(source.randint(1, 6)):
        at = source.randint(0, len(text))
        end = min(len(text), at + source.randint(0, 4))
        kind = source.randint(0, 4)
        if kind == 0:
            text = text[:at] + source.choice(ALPHABET) + text[at:]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            text = text[:at] + source.choice(PIECES) + text[end:]
        elif kind == 3:
            text = text[:at] + text[at:end] * 2 + text[end:]
        else:
            text = text[end:] + text[:at]
    return text


def test_a_hundred_thousand_damaged_files_are_a_value_or_an_error_with_a_line() -> None:
    source = random.Random(20240601)
    accepted = sum(check(mutate(source, source.choice(SEEDS))) for _ in range(100_000))
    assert 5_000 < accepted < 95_000  # else the damage would be too small or too large to say anything


def test_what_a_shell_or_ssh_would_take_for_more_than_a_name_is_refused() -> None:
    for name in [
        "-l",
        "--",
        "-oProxyCommand=id",
        "a;b",
        "a|b",
        "a&b",
        "$(a)",
        "`a`",
        "a b",
        "a\\b",
        "a'b",
        'a"b',
        "a>b",
        "a*",
        "~a",
        "a/b",
        "%h",
        "a\x00b",
        "a\nb c",
    ]:
        with pytest.raises(UsageError):
            hostfile.parse_option(f"{name}:2")
        with pytest.raises(UsageError):
            parse(f"{name} slots=2")
