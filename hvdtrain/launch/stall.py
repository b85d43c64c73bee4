"""A rank that does not get on, as it says itself; and who waits for whom, from what all ranks said. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_STACK_LINES = 60
_RANK = re.compile(r"([0-9]+): \[(.*)\]")


@dataclass(frozen=True)
class Stall:
    """Where a rank stands that has not moved for ``seconds``. ``wait`` is empty outside of a collective, and not ``certain`` where
    the same call also computes. ``at`` is the line of the user's code, else of any, that it is in; ``stacks`` are those of all threads.
    """

    phase: str = ""
    step: int | None = None
    seconds: float = 0.0
    wait: str = ""
    certain: bool = True
    at: str = ""
    stacks: str = ""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Stall:
        """What is missing or of another type is left empty: the rank is not well."""
        fields = {name: record[name] for name, kind in _KINDS.items() if isinstance(record.get(name), kind)}
        return cls(**fields)

    @property
    def waits(self) -> bool:
        """Whether it certainly waits for other ranks."""
        return bool(self.wait) and self.certain

    @property
    def text(self) -> str:
        """One sentence without a subject."""
        step = "" if self.step is None else f" (step {self.step})"
        if self.waits:
            return f"waits in {self.wait}{step}"
        inside = f", computing or waiting in {self.wait}" if self.wait else ""
        return f"is in {self.phase}{step}{inside}: {self.at}"


_KINDS = {
    "phase": str,
    "step": int,
    "seconds": int | float,
    "wait": str,
    "certain": bool,
    "at": str,
    "stacks": str,
}


class Standings:
    """What is known of the ranks of a job that may not move: feed it what they and their relays say."""

    def __init__(self) -> None:
        self._stalls: dict[int, tuple[float, Stall]] = {}  # with the time at which we heard of it
        self._suspended: set[int] = set()
        self._missing = Missing()

    def hear(self, rank: int, info: Mapping[str, Any], now: float) -> None:
        """A report or the last words of a rank."""
        if "suspended" in info:
            (self._suspended.add if info["suspended"] else self._suspended.discard)(rank)
        if isinstance(stall := info.get("stall"), Mapping):
            self._stalls[rank] = now, Stall.from_record(stall)

    def read(self, text: str) -> None:
        """A line of a rank's stderr."""
        self._missing.read(text)

    def explain(self, started: Mapping[int, str], ended: Collection[int]) -> str:
        """Who waits for whom, in several lines; empty if no rank has said that it does not get on.

        Args:
            started: the host of each rank.
            ended: ranks that are gone.
        """
        if not self._stalls:
            return ""
        longest = max(stall.seconds for _, stall in self._stalls.values())
        newest = max(heard for heard, _ in self._stalls.values())
        # What a rank said before it moved on is old by now.
        standing = {rank: stall for rank, (heard, stall) in self._stalls.items() if heard >= newest - longest}
        for rank in self._suspended:
            standing.pop(rank, None)
        others = {rank: _silence(rank, host, self._suspended, ended) for rank, host in started.items() if rank not in standing}
        return f"no progress for {longest:.0f} s\n{explain(standing, started, others, self._missing.ranks)}"


def _silence(rank: int, host: str, suspended: Collection[int], ended: Collection[int]) -> str:
    if rank in suspended:
        return f"on {host} is stopped (SIGSTOP, or a debugger)"
    if rank in ended:
        return f"on {host} did not say where it stands: it got on until then, or native code keeps Python's lock (stacks above)"
    return f"on {host} says nothing: is the host, or its network, down?"


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


def explain(
    standing: Mapping[int, Stall], hosts: Mapping[int, str], others: Mapping[int, str], missing: Mapping[int, str]
) -> str:
    """Several lines: who waits in which collective, then who does not, with the stacks of the likely cause.

    Args:
        others: ranks that said nothing, each with what is known of it ("on node2 is stopped").
        missing: ranks that did not bring tensors which others wait for, with their names, as Horovod's coordinator said.
    """
    waiting: dict[str, list[int]] = {}
    elsewhere: list[int] = []
    somewhere_else = bool(others) or any(not stall.wait for stall in standing.values())
    for rank, stall in sorted(standing.items()):
        # One that computes or waits is taken to wait where Horovod misses others, or where somebody certainly is elsewhere.
        if stall.waits or (stall.wait and (rank not in missing if missing else somewhere_else)):
            step = "" if stall.step is None else f" (step {stall.step})"
            waiting.setdefault(f"in {stall.wait}{step}", []).append(rank)
        else:
            elsewhere.append(rank)
    lines = [f"{ranks(group)} wait{'s' * (len(group) == 1)} {where}" for where, group in waiting.items()]
    lines += [f"rank {rank} on {hosts.get(rank, '?')} {standing[rank].text}{_lacks(rank, missing)}" for rank in elsewhere]
    lines += [f"rank {rank} {what}{_lacks(rank, missing)}" for rank, what in sorted(others.items())]
    causes = elsewhere or (min(waiting.values(), key=len)[:1] if len(waiting) > 1 else [])
    for rank in causes[:2]:
        stacks = standing[rank].stacks.rstrip().splitlines()
        lines += [
            "",
            f"    stacks of rank {rank}, the innermost call last:",
            *(f"    {line}" for line in stacks[:_STACK_LINES]),
        ]
    return "\n".join(lines)


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
    words: list[str] = []
    for first, last in runs:
        words += [f"{first}-{last}"] if last > first + 1 else map(str, range(first, last + 1))
    listed = ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]
    return f"rank{'s' * (len(numbers) > 1)} {listed}"
