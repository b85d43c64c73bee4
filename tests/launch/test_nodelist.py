"""Slurm's node lists."""

from __future__ import annotations

import tracemalloc

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import nodelist
from hvdtrain.launch.nodelist import compress, compress_tasks, expand, split, tasks_per_node

LISTS = {
    "node[01-03],gpu1": ["node01", "node02", "node03", "gpu1"],
    "node[1,3-4]": ["node1", "node3", "node4"],
    "n[08-11]-ib": ["n08-ib", "n09-ib", "n10-ib", "n11-ib"],
    "login": ["login"],
    "n[3,1]": ["n3", "n1"],
    "n9,n10": ["n9", "n10"],
}


@pytest.mark.parametrize("text", LISTS)
def test_expand_and_split(text: str) -> None:
    assert [name for item in split(text) for name in expand(item)] == LISTS[text]


@pytest.mark.parametrize("text", LISTS)
def test_compress_keeps_order_and_padding(text: str) -> None:
    assert [name for item in split(compress(LISTS[text])) for name in expand(item)] == LISTS[text]


def test_several_brackets_count_like_an_odometer() -> None:
    assert expand("r[1-2]n[01-02]") == ["r1n01", "r1n02", "r2n01", "r2n02"]


@pytest.mark.parametrize("text", ["n[", "n]", "n[]", "n[1-]", "n[-1]", "n[a]", "n[2-1]", "n[[1]]", "n[1-2]n[1-999999]", "n[١]"])
def test_what_is_no_list_says_why(text: str) -> None:
    with pytest.raises(UsageError):
        expand(text)


HUGE = {
    "brackets multiply": ("r[1-1000]n[1-1000]m[1-1000]", "more than 100000 names"),
    "one bracket adds up": (f"n[{','.join(['0-99999'] * 1000)}]", "more than 100000 names"),
    "a long text, often": (f"n[0-99999]{'x' * 1_000_000}", "names of more than 253 characters"),
    "many brackets": ("[1]" * 100_000, "names of more than 253 characters"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_list_that_would_fill_the_memory_is_refused_before_it_is_built(name: str) -> None:
    pattern, problem = HUGE[name]
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=problem) as caught:
            expand(pattern)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20  # 100,000 short names take half of that
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300


def test_tasks_per_node() -> None:
    assert tasks_per_node("4(x3),2") == [4, 4, 4, 2]
    assert compress_tasks([4, 4, 4, 2]) == "4(x3),2"
    for bad in ("", "x", "0", "4(x0)", "4(3)", f"1(x{nodelist.MAX_NAMES + 1})"):
        with pytest.raises(UsageError):
            tasks_per_node(bad)
