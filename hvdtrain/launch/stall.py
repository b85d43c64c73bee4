"""Who waits for whom, from what the ranks of a job that does not move said of themselves. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STACK_LINES = 60
_RANK = re.compile(r"([0-9]+): \[(.*)\]")


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: ``watchdog.Stall``, as its relay passed it on."""

    rank: int
    host: str
    phase: str
    step: int | None
    seconds: float
    wait: str
    certain: bool
    at: str
    stacks: str

    @classmethod
    def from_record(cls, rank: int, host: str, record: Mapping[str, Any]) -> Standing:
        step, seconds = record.get("step"), record.get("seconds")
        return cls(
            rank,
            host,
            phase=str(record.get("phase") or ""),
            step=step if isinstance(step, int) else None,
            seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
            wait=str(record.get("wait") or ""),
            certain=record.get("certain") is not False,
            at=str(record.get("at") or ""),
            stacks=str(record.get("stacks") or ""),
        )

    @property
    def of_step(self) -> str:
        return "" if self.step is None else f" (step {self.step})"


class Missing:
    """The ranks that Horovod's coordinator misses, from its lines on stderr: ``Missing ranks:``, then ``1: [name, name ...]``."""

    def __init__(self) -> None:
        #: rank -> the tensors that it has not brought, by the newest such lines
        self.ranks: dict[int, str] = {}
        self._is_open = False

    def read(self, text: str) -> None:
        match = _RANK.fullmatch(text.strip()) if self._is_open else None
        if match is not None:
            names = [name.strip().removeprefix("allreduce.") for name in match[2].split(",")]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.ranks[int(match[1])] = ", ".join(names[:3]) + more
            return
        self._is_open = text.strip() == "Missing ranks:"
        if self._is_open:
            self.ranks = {}


def explain(standing: Sequence[Standing], others: Mapping[int, str], missing: Mapping[int, str]) -> str:
    """Several lines: who waits in which collective, then who does not, with the stacks of the likely cause.

    Args:
        others: ranks that said nothing, each with what is known of it ("on node2 is stopped").
        missing: ranks that did not bring tensors which others wait for, with their names, as Horovod's coordinator said.
    """
    waiting: dict[str, list[Standing]] = {}
    elsewhere: list[Standing] = []
    for one in sorted(standing, key=lambda one: one.rank):
        if one.wait and (one.certain or (one.rank not in missing and (missing or others))):
            waiting.setdefault(f"in {one.wait}{one.of_step}", []).append(one)
        else:
            elsewhere.append(one)
    unsure = [one for one in elsewhere if one.wait]
    if len(unsure) < len(elsewhere):  # somebody is certainly elsewhere: the others wait for that one
        for one in unsure:
            waiting.setdefault(f"in {one.wait}{one.of_step}", []).append(one)
        elsewhere = [one for one in elsewhere if not one.wait]
    lines = [f"{ranks([one.rank for one in group])} wait{'s' * (len(group) == 1)} {where}" for where, group in waiting.items()]
    for one in elsewhere:
        lines.append(f"rank {one.rank} on {one.host} {_is_at(one)}{_lacks(one.rank, missing)}")
    lines += [f"rank {rank} {what}{_lacks(rank, missing)}" for rank, what in sorted(others.items())]
    causes = elsewhere or (min(waiting.values(), key=len)[:1] if len(waiting) > 1 else [])
    for one in causes[:2]:
        stacks = one.stacks.rstrip().splitlines()
        lines += [
            "",
            f"    stacks of rank {one.rank}, the innermost call last:",
            *(f"    {line}" for line in stacks[:_STACK_LINES]),
        ]
    return "\n".join(lines)


def _is_at(one: Standing) -> str:
    inside = f", computing or waiting in {one.wait}" if one.wait else ""
    return f"is in {one.phase}{one.of_step}{inside}: {one.at}"


def _lacks(rank: int, missing: Mapping[int, str]) -> str:
    return f"; it did not bring {missing[rank]}" if rank in missing else ""


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1 and 3``, ``ranks 0-6 and 8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [
        word
        for first, last in runs
        for word in ([str(first)] if first == last else [str(first), str(last)] if last == first + 1 else [f"{first}-{last}"])
    ]
    listed = ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]
    return f"rank{'s' * (len(numbers) > 1)} {listed}"
