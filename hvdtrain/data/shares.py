"""Unequal shares of a batch for hosts of unequal speed."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.errors import UsageError


def host_shares(text: str, hosts: Sequence[str], *, lenient: bool = False) -> tuple[int, ...]:
    """The portions of each rank, from ``node1=2,node2=1``: each rank on node1 gets twice the samples of one on node2.

    ``hosts`` has the host of each rank; the text may give its first label alone. Hosts that are not named have 1.
    ``lenient``: a host that is named may be away, as in an elastic job.

    Raises:
        UsageError: a host that no rank is on, one named twice, a share that is no whole number of 0 or more, or none left.
    """
    named: dict[str, int] = {}
    problems = []
    for item in text.split(","):
        name, _, share = (part.strip() for part in item.partition("="))
        found = {host for host in hosts if name in (host, host.partition(".")[0])}
        if not share.isascii() or not share.isdigit():
            problems.append(f"{item!r} is no HOST=SHARE with a whole number")
        elif not found and not lenient:
            problems.append(f"no rank is on {name!r}")
        elif found & named.keys():
            problems.append(f"{name!r} is given twice")
        else:
            named |= dict.fromkeys(found, int(share))
    if not problems and not any(named.get(host, 1) for host in hosts):
        problems.append("no host has a share above 0")
    if problems:
        there = ",".join(f"{host}=1" for host in dict.fromkeys(hosts))
        raise UsageError(f"--share {text}: {'; '.join(problems)}", f"the hosts of this job: --share {there}").everywhere()
    return tuple(named.get(host, 1) for host in hosts)
