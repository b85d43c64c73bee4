"""Ranges of host names as Slurm writes them: ``node[01-03,07],gpu1`` and ``4(x3),2``."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Sequence

from hvdtrain.errors import UsageError, shown

#: More names than this in one list is taken for a slip of the pen, and would only eat memory.
MAX_NAMES = 100_000
#: No host name is longer; here it bounds what a short pattern can be expanded to.
MAX_LENGTH = 253

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", re.ASCII)


def split(text: str) -> list[str]:
    """Cut at the commas that are not inside brackets."""
    items, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
    return [*items, text[start:]]


def expand(pattern: str) -> list[str]:
    """``rack[1-2]n[01-02]`` -> rack1n01, rack1n02, rack2n01, rack2n02. A pattern without brackets is one name.

    Raises:
        UsageError: it is not well formed, or stands for too much; that is counted before anything is built.
    """
    first, *rest = _GROUP.split(pattern)
    groups, texts = rest[::2], rest[1::2]
    odd = next((char for text in (first, *texts) for char in text if char in "[]"), "")
    if odd:
        raise _error(f"'{odd}' without '{']' if odd == '[' else '['}' in '{shown(pattern)}'")
    if not groups:
        return [pattern]
    if len(pattern) - sum(map(len, groups)) - len(groups) > MAX_LENGTH:
        raise _error(f"'{shown(pattern)}' stands for names of more than {MAX_LENGTH} characters")
    ranges = [[_range(item, pattern) for item in group.split(",")] for group in groups]
    if math.prod(sum(high - low + 1 for low, high, _ in group) for group in ranges) > MAX_NAMES:
        raise _error(f"'{shown(pattern)}' stands for more than {MAX_NAMES} names")
    choices = [[f"{number:0{width}}" for low, high, width in group for number in range(low, high + 1)] for group in ranges]
    ends = [[f"{choice}{text}" for choice in each] for each, text in zip(choices, texts, strict=True)]
    return ["".join((first, *parts)) for parts in itertools.product(*ends)]


def _range(item: str, pattern: str) -> tuple[int, int, int]:
    """``01-16`` -> 1, 16 and the width 2."""
    match = _NUMBERS.fullmatch(item)
    if match is None:
        raise _error(f"'{shown(item)}' in '{shown(pattern)}' is not a number or a range such as 01-16")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise _error(f"range '{item}' in '{shown(pattern)}' runs backwards")
    return low, high, len(match[1])


def _error(problem: str) -> UsageError:
    return UsageError(problem, "write 'node[01-16]:4'")


def compress(names: Sequence[str]) -> str:
    """The shortest list that keeps the order: node01, node02, node03, gpu1 -> ``node[01-03],gpu1``."""
    runs: list[tuple[str, list[str], str]] = []  # text before, numbers, text after
    for name in names:
        before, number, after = _numbered(name)
        if runs and number and runs[-1][1] and (runs[-1][0], runs[-1][2]) == (before, after):
            runs[-1][1].append(number)
        else:
            runs.append((before, [number] if number else [], after))
    return ",".join(f"{before}{_group(numbers)}{after}" for before, numbers, after in runs)


def _numbered(name: str) -> tuple[str, str, str]:
    """The name around its last number: n08-ib -> n, 08, -ib. A name without one, or with a very long one, is text."""
    to_number = name.rstrip(string.ascii_letters + "._-")
    before = to_number.rstrip(string.digits)
    number = to_number[len(before) :]
    return (before, number, name[len(to_number) :]) if 0 < len(number) < 10 else (name, "", "")


def _group(numbers: list[str]) -> str:
    if len(numbers) < 2:
        return "".join(numbers)
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][0])) == number:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"[{','.join('-'.join(ends) for ends in ranges)}]"


def tasks_per_node(text: str) -> list[int]:
    """``4(x3),2`` -> 4, 4, 4, 2: the value of SLURM_TASKS_PER_NODE."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or int(match[1]) == 0 or int(match[2] or 1) == 0:
            raise UsageError(f"'{shown(item)}' is not a number of tasks such as 4 or 4(x3)", "write 4(x3),2")
        if len(counts) + int(match[2] or 1) > MAX_NAMES:
            raise UsageError(f"'{shown(text, 40)}' stands for more than {MAX_NAMES} nodes", "write 4(x3),2")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def compress_tasks(counts: Sequence[int]) -> str:
    """4, 4, 4, 2 -> ``4(x3),2``."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
