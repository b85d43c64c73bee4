"""Who else wants this machine's processors: what is measured beside them is theirs too."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

#: What others may use without a word: there is always something.
_QUIET = 0.2
_LOOK_S = 0.5


def warnings(ranks: int, cpus: int, busy: float) -> list[str]:
    """What figures of so many ranks on this machine suffer from, a sentence each.

    Args:
        cpus: that the ranks may use.
        busy: the part of the machine's processor time that others use.
    """
    found = []
    if busy > _QUIET:
        found.append(
            f"other programs use {busy:.0%} of this machine's processors: times come out longer, and farther apart, than on an "
            "idle one; compare only what was measured in one go, and its fastest rounds"
        )
    if ranks > cpus:
        found.append(
            f"{ranks} ranks take turns on {cpus} processor{'s' if cpus > 1 else ''} here: each waits for others to run, so these "
            f"are not the times of {ranks} processors"
        )
    return found


def busy(look_s: float = _LOOK_S) -> float:
    """The part of all processors' time that is used now, by whomever: nothing of ours runs yet."""
    before = _times()
    time.sleep(look_s)
    return used(before, _times())


def used(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Of the time between two looks. What a hypervisor gives to others is not ours either. Pure."""
    spent = {name: max(0.0, after[name] - before[name]) for name in after if name not in _WITHIN}
    total = sum(spent.values())
    return 1 - (spent.get("idle", 0.0) + spent.get("iowait", 0.0)) / total if total else 0.0


#: They are counted in "user" and "nice" as well.
_WITHIN = ("guest", "guest_nice")


def _times() -> Mapping[str, float]:
    found: Mapping[str, float] = psutil.cpu_times()._asdict()
    return found
