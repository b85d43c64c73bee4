"""Ranges of host names as Slurm writes them: ``node[01-03,07],gpu1`` and ``4(x3),2``."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: More names than this in one list is taken for a slip of the pen, and would only eat memory.
MAX_NAMES = 100_000

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


class NodelistError(ValueError):
    """The text is not a list of names; the message says why."""


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
    """``rack[1-2]n[01-02]`` -> rack1n01, rack1n02, rack2n01, rack2n02. A pattern without brackets is one name."""
    names = [""]
    rest = pattern
    while rest:
        text, bracket, rest = rest.partition("[")
        if "]" in text:
            raise NodelistError(f"']' without '[' in '{pattern}'")
        choices = [""]
        if bracket:
            group, closed, rest = rest.partition("]")
            if not closed or "[" in group:
                raise NodelistError(f"'[' without ']' in '{pattern}'")
            choices = _numbers(group, pattern)
        if len(names) * len(choices) > MAX_NAMES:
            raise NodelistError(f"'{pattern}' stands for more than {MAX_NAMES} names")
        names = [f"{name}{text}{choice}" for name in names for choice in choices]
    return names


def _numbers(group: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for item in group.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item, re.ASCII)
        if match is None:
            raise NodelistError(f"'{item}' in '{pattern}' is not a number or a range such as 01-16")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise NodelistError(f"range '{item}' in '{pattern}' runs backwards")
        if int(high) - int(low) >= MAX_NAMES:
            raise NodelistError(f"'{pattern}' stands for more than {MAX_NAMES} names")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def compress(names: Sequence[str]) -> str:
    """The shortest list that keeps the order: node01, node02, node03, gpu1 -> ``node[01-03],gpu1``."""
    runs: list[tuple[str, list[str], str]] = []  # text before, numbers, text after
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, number, after = (match[1], match[2], match[3]) if match and len(match[2]) < 10 else (name, "", "")
        if runs and number and runs[-1][1] and (runs[-1][0], runs[-1][2]) == (before, after):
            runs[-1][1].append(number)
        else:
            runs.append((before, [number] if number else [], after))
    return ",".join(f"{before}{_group(numbers)}{after}" for before, numbers, after in runs)


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
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item.strip(), re.ASCII)
        if match is None or int(match[1]) == 0 or int(match[2] or 1) == 0:
            raise NodelistError(f"'{item}' is not a number of tasks such as 4 or 4(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MAX_NAMES:
            raise NodelistError(f"'{text[:40]}' stands for more than {MAX_NAMES} nodes")
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
