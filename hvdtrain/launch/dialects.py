"""Writing hosts down, in each dialect that a launcher or a batch system reads. ``hostfile`` reads them all back.

A dialect that cannot say something (a port, a user, which devices) refuses: what is dropped in silence is missed on the cluster.
Only ``max_slots`` is left out with a warning: it allows more ranks than slots, and no rank goes elsewhere without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, nodelist


@dataclass(frozen=True)
class Dialect:
    """What it is for, how to write it, and which details it can say beside names and slots."""

    about: str
    write: Callable[[Sequence[Host]], str]
    can_say: frozenset[str] = frozenset()


#: What to do about a detail that a dialect cannot say.
_INSTEAD = {
    "user": "put it into ~/.ssh/config",
    "port": "put it into ~/.ssh/config",
    "IPv6": "give the host a name, or choose another dialect",
    "which devices": "leave out whole hosts here, and slots in the run: hvdtrain run --exclude HOST:SLOTS",
}


def render(hosts: Sequence[Host], dialect: str) -> str:
    """The hosts in one of ``DIALECTS``. UsageError if that dialect cannot say all that is known about them."""
    known = DIALECTS[dialect]
    for host in hosts:
        said = {
            "user": host.user,
            "port": host.port,
            "IPv6": host.is_ipv6,
            "which devices": host.devices not in ((), tuple(range(host.slots))),
        }
        lost = [what for what, value in said.items() if value and what not in known.can_say]
        if lost:
            hint = "; ".join(dict.fromkeys(_INSTEAD[what] for what in lost))
            raise UsageError(f"the {dialect} dialect cannot say {' and '.join(lost)} (host {host.name})", hint)
    return known.write(hosts)


def warnings(hosts: Sequence[Host], dialect: str) -> list[str]:
    """What ``render`` leaves out."""
    lost = [host.name for host in hosts if host.max_slots is not None] if "max_slots" not in DIALECTS[dialect].can_say else []
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return [f"the {dialect} dialect has no max_slots: left out (host {lost[0]}{more})"] if lost else []


def _each(form: str, between: str = "\n") -> Callable[[Sequence[Host]], str]:
    """Every host by the same form."""
    return lambda hosts: between.join(form.format(host) for host in hosts) + "\n"


def _full(host: Host, name: str = "") -> str:
    login = f"{host.user}@" if host.user else ""
    maximum = f" max_slots={host.max_slots}" if host.max_slots is not None else ""
    port = f" port={host.port}" if host.port is not None else ""
    return f"{login}{name or host.address} slots={host.slots}{maximum}{port}\n"


def _openmpi(host: Host) -> str:
    maximum = f" max_slots={host.max_slots}" if host.max_slots is not None else ""
    user = f" username={host.user}" if host.user else ""
    return f"{host.name} slots={host.slots}{maximum}{user}\n"


def _ranges(hosts: Sequence[Host]) -> str:
    """Neighbours that differ in nothing but the name share a line; an IPv6 address has one of its own."""
    lines = []
    for alike, group in groupby(hosts, lambda host: replace(host, name=host.name if host.is_ipv6 else "")):
        names = [alike.address] if alike.is_ipv6 else nodelist.split(nodelist.compress([host.name for host in group]))
        lines += [_full(alike, name) for name in names]
    return "".join(lines)


def _slurm(hosts: Sequence[Host]) -> str:
    tasks = nodelist.compress_tasks([host.slots for host in hosts])
    return f"SLURM_JOB_NODELIST={nodelist.compress([host.name for host in hosts])}\nSLURM_TASKS_PER_NODE={tasks}\n"


#: No dialect can say which devices a host's ranks get.
_ALL = frozenset(_INSTEAD) - {"which devices"} | {"max_slots"}

DIALECTS = {
    "hvdtrain": Dialect("every detail, one host a line", lambda hosts: "".join(map(_full, hosts)), _ALL),
    "ranges": Dialect("as hvdtrain, with neighbours as node[01-16]", _ranges, _ALL),
    "openmpi": Dialect(
        "Open MPI: host slots=4 max_slots=8", lambda hosts: "".join(map(_openmpi, hosts)), frozenset({"max_slots", "user"})
    ),
    "horovod": Dialect("horovodrun -H: a:4,b:4", _each("{0.name}:{0.slots}", ",")),
    "deepspeed": Dialect("DeepSpeed and horovodrun --hostfile: host slots=4", _each("{0.name} slots={0.slots}")),
    "mpich": Dialect("MPICH (Hydra): host:4", _each("{0.name}:{0.slots}")),
    "intel": Dialect("Intel MPI: host:4", _each("{0.name}:{0.slots}")),
    "pbs": Dialect(
        "PBS node file: a line for each slot", lambda hosts: "".join(f"{host.name}\n" * host.slots for host in hosts)
    ),
    "lsf": Dialect("LSF's LSB_MCPU_HOSTS: hostA 2 hostB 4", _each("{0.name} {0.slots}", " ")),
    "slurm": Dialect("the two variables of a Slurm job", _slurm),
}
