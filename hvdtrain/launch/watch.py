"""What the launching side learns about a running job from its events: who started, who ended and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.launch import Host, failures, place
from hvdtrain.launch.failures import Failure
from hvdtrain.launch.frames import Ended, Event, Line, Note, Started

_NOTES_KEPT = 30


class Watch:
    """Feed it every event; afterwards ask for the failures.

    Args:
        hosts: the plan; ranks that start elsewhere mean that the launcher did not read it. None: there is no plan (elastic).
    """

    def __init__(self, hosts: Sequence[Host] | None) -> None:
        self._has_plan = hosts is not None
        self._planned = [(slot.host.name, slot.node_rank) for slot in place(hosts or ())]
        self._started: dict[int, str] = {}
        #: whether a rank has failed by itself
        self.any_failed = False
        self._ended: dict[int, Ended] = {}
        self._notes: list[str] = []
        self._last_line: dict[int, str] = {}

    def see(self, event: Event) -> None:
        match event:
            case Line(rank=rank, text=text, stream="out") if text.strip():
                self._last_line[rank] = text
            case Started(rank=rank, host=host):
                self._started[rank] = host
            case Ended(rank=rank, info=info):
                self._ended[rank] = event
                self.any_failed |= bool(info.get("code")) and not info.get("told")
            case Note(text=text) if text.strip():
                self._notes = [*self._notes[-_NOTES_KEPT + 1 :], text]
            case _:
                pass

    @property
    def notes(self) -> Sequence[str]:
        """The last lines that the launcher itself wrote."""
        return self._notes

    def misplaced(self) -> str:
        """A sentence if the ranks that have started are not where they were planned, else empty."""
        if not self._has_plan:
            return ""
        if len(self._started) < len(self._planned):
            return ""  # for a wrong number of ranks, too, this is the time to say so
        if max(self._started) >= len(self._planned):
            return f"rank {max(self._started)} started, but {len(self._planned)} ranks were planned"
        # One host under two names in a hostfile is odd, and works; everything on one host is a hostfile that was not read.
        seen, planned = set(self._started.values()), {node for _, node in self._planned}
        if len(seen) == 1 and len(planned) > 1:
            return f"hosts seen: 1 of {len(planned)} planned ({', '.join(seen)})"
        return ""

    def failures(self, errors: Path | None, since: float) -> list[Failure]:
        """The earliest first: from what the relays said, and from the files that ranks wrote to ``errors`` after ``since``."""
        found: dict[int, Failure] = {}
        for rank, ended in self._ended.items():
            if ended.info.get("code") and (ended.info.get("phase") or not ended.info.get("told")):
                failure = Failure.from_record(
                    {"time": 0, **ended.info, "rank": rank, "host": ended.info.get("host") or ended.host}
                )
                found[rank] = failure.with_code(int(ended.info["code"])).with_last_line(self._last_line.get(rank, ""))
        for failure in failures.read(errors) if errors is not None else []:
            if failure.time >= since and (failure.rank not in found or not found[failure.rank].phase):
                found[failure.rank] = failure
        return failures.earliest_first(list(found.values()))

    def silent(self) -> list[str]:
        """Ranks that started and whose end was never reported: their host, or the way to it, is gone."""
        return [f"rank {rank} on {host}" for rank, host in sorted(self._started.items()) if rank not in self._ended]

    def silent_hosts(self) -> list[str]:
        """Hosts that started ranks and reported the end of none, while other hosts did: the likely cause of the others' errors."""
        ended = {self._started[rank] for rank in self._ended if rank in self._started}
        return sorted({host for host in self._started.values() if host not in ended}) if ended else []

    def never_started(self) -> list[str]:
        return [f"rank {rank} on {name}" for rank, (name, _) in enumerate(self._planned) if rank not in self._started]
