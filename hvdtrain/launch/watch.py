"""What the launching side learns about a running job from its events: who started, who ended and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.launch import Job, failures, place
from hvdtrain.launch.failures import Failure
from hvdtrain.launch.frames import Ended, Event, Line, Report, Started
from hvdtrain.launch.stall import Standings


class Watch:
    """Feed it every event; afterwards ask for the failures.

    Args:
        job: its hosts are the plan (but an elastic job has none); ranks that start elsewhere mean that the launcher did not read it.
        errors: where ranks leave their last words, if they do. Those of other jobs are left alone.
    """

    def __init__(self, job: Job, errors: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._errors, self._clock = errors, clock
        self._name = job.env.get(failures.JOB_VARIABLE, "")
        self.is_elastic = job.elastic is not None
        #: whether ranks tell of their start and their end (through relays)
        self.hears_ranks = job.tagged
        has_plan = self.hears_ranks and not self.is_elastic
        self._planned = [(slot.host.name, slot.node_rank) for slot in place(job.hosts)] if has_plan else []
        self._started: dict[int, str] = {}
        #: whether a rank has failed by itself
        self.any_failed = False
        #: whether somebody asked us for a stop in order, and whether that was before any rank had begun
        self.was_asked = self.was_asked_early = False
        #: whether a rank was told to end, by whomever
        self.any_told = False
        self._ended: dict[int, Ended] = {}  # in the order in which we heard of it
        self._began_at: float | None = None
        self._ended_at: dict[int, float] = {}
        self._before_signal: list[Failure] | None = None
        self._last_line: dict[int, str] = {}
        self._standings = Standings()

    def see(self, event: Event) -> None:
        match event:
            case Line(rank=rank, text=text, stream="out") if text.strip():
                self._last_line[rank] = text
            case Line(stream="err", text=text):
                self._standings.read(text)
            case Report(rank=rank, info=info):
                self._standings.hear(rank, info, self._clock())
            case Started(rank=rank, host=host):
                self._started[rank] = host
                self._began_at = self._clock() if self._began_at is None else self._began_at
            case Ended(rank=rank):
                self._ended[rank] = event
                self._ended_at[rank] = now = self._clock()
                self._standings.hear(rank, event.info, now)
                self.any_failed |= _is_failure(event)
                self.any_told |= bool(event.info.get("told"))
            case _:
                pass

    @property
    def is_done(self) -> bool:
        """Whether all ranks have ended well, and none of them because it was told to."""
        ends = self._ended.values()
        return 0 < len(self._planned) == len(ends) and not any(
            ended.info.get("code") or ended.info.get("told") for ended in ends
        )

    def stall(self) -> str:
        """Who waits for whom in a job that does not move, as far as its ranks have said; empty if none has."""
        return self._standings.explain(self._started, self._ended.keys())

    def misplaced(self) -> str:
        """A sentence if the ranks that have started are not where they were planned, else empty."""
        if not self._planned or len(self._started) < len(self._planned):
            return ""  # for a wrong number of ranks, too, this is the time to say so
        if max(self._started) >= len(self._planned):
            return f"rank {max(self._started)} started, but {len(self._planned)} ranks were planned"
        # One host under two names in a hostfile is odd, and works; everything on one host is a hostfile that was not read.
        seen, planned = set(self._started.values()), {node for _, node in self._planned}
        if len(seen) == 1 and len(planned) > 1:
            return f"hosts seen: 1 of {len(planned)} planned ({', '.join(seen)})"
        return ""

    def signalled(self) -> None:
        """A signal is about to end the job: what is said from now on is its consequence."""
        self._before_signal = self._found(with_files=not self._started)  # reading files may take long, and relays told us all

    def asked(self) -> None:
        """The job was asked to stop in order: whatever comes now, it is not to be started again."""
        self.was_asked, self.was_asked_early = True, not self._started

    @property
    def was_signalled(self) -> bool:
        return self._before_signal is not None

    @property
    def is_explained(self) -> bool:
        """Whether a rank said more than its exit code."""
        return any(failure.error != f"exit code {failure.exit_code}" for failure in self.failures())

    def failures(self) -> list[Failure]:
        """The earliest first. Not those of ranks that were told to end, and not those that a signal caused."""
        return self._found(with_files=True) if self._before_signal is None else self._before_signal

    def _found(self, *, with_files: bool) -> list[Failure]:
        """From what the relays said; where they did not, or had no last words, from the files that the ranks wrote."""
        found: dict[int, Failure] = {}
        for rank, ended in self._ended.items():
            if _is_failure(ended):
                record = {"time": 0, **ended.info, "rank": rank, "host": ended.info.get("host") or ended.host}
                failure = Failure.from_record(record).with_code(int(ended.info["code"]))
                found[rank] = failure.with_last_line(self._last_line.get(rank, ""))
        for failure in failures.read(self._errors, self._name) if with_files and self._errors is not None else []:
            rank = failure.rank
            if rank not in self._ended or (rank in found and not found[rank].phase):
                found[rank] = failure
        if found and all(failure.is_consequence for failure in found.values()):
            found.update(self._ending())
            uncalled = self.uncalled()
            if uncalled is not None and not any(failure.follows for failure in found.values()):
                found[uncalled.rank] = uncalled
        return failures.earliest_first(list(found.values()))

    def _ending(self) -> dict[int, Failure]:
        """Ranks that had told of an exception when they were told to end: with Gloo, a rank that fails waits for the others."""
        return {
            rank: Failure(rank, float(ended.info.get("time") or 0), ended.host, error=str(ended.info["said"]))
            for rank, ended in self._ended.items()
            if ended.info.get("told") and ended.info.get("said")
        }

    def uncalled(self, code: int = 0) -> Failure | None:
        """The first rank that ended, if it was told to and nothing explains that: none had failed, left, or gone without a word.

        It is for a job that no signal to us has ended: somebody else's signal to one rank, or to the launcher. A launcher whose
        exit ``code`` is that signal's may have lost what other ranks said.
        """
        rank, ended = next(iter(self._ended.items()), (0, None))
        told = int(ended.info.get("told") or 0) if ended is not None else 0
        if ended is None or not told or self.is_elastic or (self.silent() and code != 128 + told):
            return None
        words = f"it was told to end ({failures.signal_of(128 + told)}), and not by hvdtrain run"
        return Failure(rank, float(ended.info.get("time") or 0), ended.host, error=words, exit_code=128 + told)

    def left_early(self) -> list[str]:
        """Ranks that ended with exit code 0 before the first one that failed or had to be told to end."""
        early: list[str] = []
        for rank, ended in self._ended.items():
            if ended.info.get("code") or ended.info.get("told"):
                return early
            after_s = self._ended_at[rank] - (self._began_at or self._ended_at[rank])
            early.append(f"rank {rank} on {ended.host} (after {after_s:.1f} s)")
        return early if self.silent() else []  # all have ended well, or nobody knows better

    def silent(self) -> list[str]:
        """Ranks that started and whose end was never reported: their host, or the way to it, is gone."""
        return [f"rank {rank} on {host}" for rank, host in sorted(self._started.items()) if rank not in self._ended]

    def silent_hosts(self) -> list[str]:
        """Hosts that started ranks and reported the end of none, while other hosts did: the likely cause of the others' errors."""
        ended = {self._started[rank] for rank in self._ended if rank in self._started}
        return sorted({host for host in self._started.values() if host not in ended}) if ended else []

    def never_started(self) -> list[str]:
        return [f"rank {rank} on {name}" for rank, (name, _) in enumerate(self._planned) if rank not in self._started]


def _is_failure(ended: Ended) -> bool:
    """Whether the rank failed by itself."""
    return bool(ended.info.get("code")) and not ended.info.get("told")
