"""What can be set, which of it makes sense for a job, and how a job is told of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.exchange import Exchange, bucket_mb
from hvdtrain.tune.search import ENGINE, Factor, Settings

#: Factors by the names that ``--over`` takes, with what their values are.
NAMES = {
    ENGINE: "by which gradients travel",
    "bucket": "MB that travel at once",
    "compression": "of gradients, between hosts",
    "cycle": "ms between two looks of Horovod's at what is ready",
    "threads": "of each rank",
    "mpi": "plain: Open MPI's own choice of an allreduce",
}
#: Those that change what is computed: never without being asked for.
CHANGES_RESULTS = "compression"

#: factor -> the option of ``hvdtrain train`` that it is
OPTIONS = {ENGINE: "exchange", "bucket": "bucket_mb", "compression": "compression"}
#: factor -> the variables of the ranks that it is
VARIABLES = {
    "cycle": ("HOROVOD_CYCLE_TIME",),
    "threads": ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),
    "mpi": ("OMPI_MCA_coll_tuned_use_dynamic_rules",),
}

_VALUES = {
    ENGINE: ("horovod", "shared"),
    "bucket": ("1", "4", "16", "64"),
    "compression": ("bfloat16", "powersgd", "topk"),
    "cycle": ("0.3", "0.5", "2.5"),
    "mpi": ("plain",),
}


@dataclass(frozen=True)
class Facts:
    """What the choice of values hangs on.

    Attributes:
        slots: ranks of each host.
        cpus: of this host; ``threads``: what each of its ranks gets by default.
        no_mpi: why Open MPI's choice of an allreduce is not ours to change; empty if it is.
        over_mpi: whether the ranks meet over MPI.
        compression: what the configuration says of it; the default size of buckets hangs on it.
        options: names of the options of ``hvdtrain train`` that the user has set.
        variables: names of variables that the user has set for the ranks.
    """

    slots: tuple[int, ...]
    cpus: int
    threads: int
    no_mpi: str = ""
    over_mpi: bool = True
    compression: str = Exchange.compression
    options: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()


def factors(over: Sequence[str], facts: Facts) -> tuple[tuple[Factor, ...], dict[Settings, str]]:
    """What is to be searched of the factors ``over``; and what is left out, with the reason."""
    chosen: list[Factor] = []
    left_out: dict[Settings, str] = {}
    for name in (name for name in NAMES if name in over):
        why = _refusal(name, facts)
        if why:
            left_out[((name, ""),)] = why
            continue
        values = _threads(facts) if name == "threads" else _VALUES[name]
        if name == "bucket":
            values = tuple(value for value in values if float(value) != bucket_mb(facts.compression))
        if name == ENGINE and (reason := _no_shared(facts)):
            left_out[((name, "shared"),)] = reason
            values = ("horovod",)
        chosen.append(Factor(name, values, "" if name in (ENGINE, "threads") else "horovod"))
    return tuple(chosen), left_out


def is_value(name: str, value: str) -> bool:
    """Whether a search may find this value of a factor, on whatever hosts."""
    return re.fullmatch(r"[1-9][0-9]{0,3}", value) is not None if name == "threads" else value in _VALUES.get(name, ())


def options_of(settings: Settings) -> dict[str, str]:
    """The settings that are options of ``hvdtrain train``."""
    return {OPTIONS[name]: value for name, value in settings if name in OPTIONS}


def wishes_of(settings: Settings) -> dict[str, str]:
    """The same for a run: shared memory only as far as there is room for it by then."""
    return {
        name: "prefer-shared" if (name, value) == (OPTIONS[ENGINE], "shared") else value
        for name, value in options_of(settings).items()
    }


def variables_of(settings: Settings) -> dict[str, str]:
    """The settings that are variables of the ranks."""
    return {
        variable: "0" if name == "mpi" else value
        for name, value in settings
        if name in VARIABLES
        for variable in VARIABLES[name]
    }


def text(settings: Settings) -> str:
    """``exchange=horovod bucket=16``."""
    return " ".join(f"{name}={value}" if value else name for name, value in settings) or "defaults"


def given(facts_of: Mapping[str, str], default: str = "default") -> frozenset[str]:
    """The options that somebody has set, of a configuration's origins."""
    return frozenset(name for name, origin in facts_of.items() if origin not in (default, "tuned"))


def set_by_user(name: str, options: Container[str], variables: Container[str]) -> str:
    """What of a factor the user has set, who then has all of it: ``--bucket-mb``, ``OMP_NUM_THREADS``; empty: nothing."""
    if OPTIONS.get(name) in options:
        return f"--{OPTIONS[name].replace('_', '-')}"
    return next((variable for variable in VARIABLES.get(name, ()) if variable in variables), "")


def _refusal(name: str, facts: Facts) -> str:
    if of_user := set_by_user(name, facts.options, facts.variables):
        return f"you have set {of_user}"
    if name != "threads" and sum(facts.slots) == 1:
        return "one rank exchanges nothing"
    if name == "threads" and not _threads(facts):
        return f"each rank has one thread, and this host {facts.cpus} CPU" + ("s" if facts.cpus > 1 else "")
    if name == "mpi":
        return facts.no_mpi
    if name == "compression" and len(facts.slots) == 1:
        return "it acts between hosts, and this is one"
    return ""


def _no_shared(facts: Facts) -> str:
    if not facts.over_mpi:
        return "the ranks meet over Gloo, shared memory needs MPI"
    if len(set(facts.slots)) > 1:
        return "the hosts have different numbers of ranks"
    if facts.slots[0] == 1:
        return "each rank is alone on its host"
    return ""


def _threads(facts: Facts) -> tuple[str, ...]:
    """Half as many and twice as many, as far as there are CPUs: physical cores may be half of them, and ranks rarely all busy."""
    values = [facts.threads // 2, facts.threads * 2]
    return tuple(str(count) for count in values if 1 <= count <= facts.cpus)
