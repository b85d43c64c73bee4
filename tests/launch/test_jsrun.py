"""jsrun's explicit resource file, read back by the rules of IBM's page on its format. There is no LSF here to run it."""

from __future__ import annotations

import re

import pytest

from hvdtrain.launch import Host, Job, place
from hvdtrain.launch.jsrun import Jsrun

_ACTION = r"(error|warn|allow)"
_PREAMBLE = {
    "cpu_index_using": r"(logical|physical)",
    "overlapping_rs": _ACTION,
    "skip_missing_cpu": _ACTION,
    "skip_missing_gpu": _ACTION,
    "skip_missing_mem": _ACTION,
    "oversubscribe_cpu": _ACTION,
    "oversubscribe_gpu": _ACTION,
    "oversubscribe_mem": _ACTION,
    "launch_distribution": r"(packed|cyclic|balanced|plane:\d+)",
}
_RANGE = r"\d+(-\d+)?"
_SET = rf"(\*|\{{{_RANGE}(,{_RANGE})*\}})"
_KEYS = {"host": _RANGE, "hostname": r"[A-Za-z0-9][A-Za-z0-9._-]*", "cpu": _SET, "gpu": _SET, "mem": _SET}


def parse(text: str) -> dict[int, dict[str, str]]:
    """rank -> its resource set; ValueError for anything that the format does not have."""
    if not text.endswith("\n"):
        raise ValueError("no newline at the end")
    ranks: dict[int, dict[str, str]] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"rank: (\d+): \{ (.+) \}", line):
            pairs = [pair.strip().partition(": ") for pair in match[2].split(";")]
            found = {key: value for key, _, value in pairs}
            if len(found) != len(pairs) or ("host" in found) == ("hostname" in found) or "cpu" not in found:
                raise ValueError(line)
            if not all(key in _KEYS and re.fullmatch(_KEYS[key], value) for key, value in found.items()):
                raise ValueError(line)
            ranks[int(match[1])] = found
        else:
            key, _, value = line.partition(": ")
            if ranks or key not in _PREAMBLE or not re.fullmatch(_PREAMBLE[key], value):
                raise ValueError(line)
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError("ranks are missing")
    return ranks


MAPS = {
    "unequal": (Host("h1", 3), Host("h2", 1)),
    "another order": (Host("h2", 2), Host("h1", 2)),
    "some of the allocation": (Host("h1.x.gov", 2),),
}


@pytest.mark.parametrize("name", MAPS)
def test_every_rank_is_on_the_host_of_its_slot(name: str) -> None:
    hosts = MAPS[name]
    command = Jsrun("jsrun", ("h1", "h2")).command(Job(("x",), hosts, sum(host.slots for host in hosts), launch_dir="/tmp/own"))
    (path,) = command.files
    assert command.argv[1:3] == ("--erf_input", path)
    ranks = parse(command.files[path])
    assert [ranks[slot.rank]["hostname"] for slot in place(hosts)] == [slot.host.name for slot in place(hosts)]
    assert len(ranks) == len(place(hosts))


@pytest.mark.parametrize(
    "text",
    [
        "rank: 0: { hostname: a; cpu: {0-3} }",  # no newline
        "rank: 0: { hostname: a; cpu: 0-3 }\n",
        "rank: 0: { hostname: a; gpu: * }\n",
        "rank: 1: { hostname: a; cpu: {0} }\n",
        "rank: 0: { hostname: a; cpu: {0} }\noverlapping_rs: allow\n",
        "overlapping_rs: maybe\n",
    ],
)
def test_the_parser_of_this_test_is_strict(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)
