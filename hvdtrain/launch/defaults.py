"""Variables that ranks get unless the user has set them, each with its reason: a table of rules, and pure functions over it.

What all ranks must have alike is decided once, where ``hvdtrain run`` is (``of_job``); what hangs on a host, by the relay there
(``of_host``). Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

#: Rules for Open MPI's choice of an allreduce. On every host at the path that it has here, as all of this package.
RULES_FILE = str(Path(__file__).resolve().with_name("allreduce.rules"))

#: Up to glibc 2.34, a higher threshold is ignored, and setting another one then fixes it at 128 KiB (malloc.c:
#: ``do_set_mmap_threshold`` compares with HEAP_MAX_SIZE / 2). 2.36 was tried.
_OLD_GLIBC, _OLD_THRESHOLD = (2, 36), 32 << 20
_THRESHOLD, _TRIM = 4 << 30, 8 << 30


@dataclass(frozen=True)
class Setting:
    """A variable with its value, and in half a sentence why."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason}"


@dataclass(frozen=True)
class JobFacts:
    """What the defaults of a job hang on.

    Attributes:
        is_recipe: whether the ranks train a recipe, and the gradients come in our buckets.
        open_mpi: whether Open MPI carries what the ranks exchange.
        chooses_algorithms: whether the user, or who has installed this MPI, says something about Open MPI's collectives.
    """

    is_recipe: bool = False
    open_mpi: bool = False
    chooses_algorithms: bool = False


@dataclass(frozen=True)
class HostFacts:
    """What the defaults of a rank hang on.

    Attributes:
        threads: for each rank of this host.
        over_mpi: whether the ranks may meet over MPI.
        glibc: the version of the C library; empty if it is another one.
    """

    threads: int
    over_mpi: bool = True
    glibc: tuple[int, ...] = ()


_Facts = TypeVar("_Facts", JobFacts, HostFacts)


@dataclass(frozen=True)
class _Rule(Generic[_Facts]):
    name: str
    value: Callable[[_Facts], str]
    reason: str
    when: Callable[[_Facts], bool] = lambda facts: True


def _tunes_allreduce(facts: JobFacts) -> bool:
    return facts.open_mpi and not facts.chooses_algorithms


_OF_JOB: Sequence[_Rule[JobFacts]] = (
    _Rule("PYTHONUNBUFFERED", lambda _: "1", "lines are shown as they are printed"),
    _Rule("TF_CPP_MIN_LOG_LEVEL", lambda _: "2", "TensorFlow says warnings and errors only"),
    _Rule(
        "HOROVOD_FUSION_THRESHOLD",
        lambda _: "0",
        "gradients come in flat buckets, and fusing would copy them twice",
        lambda facts: facts.is_recipe,
    ),
    _Rule("OMPI_MCA_coll_tuned_use_dynamic_rules", lambda _: "1", "reads the rules that the next line names", _tunes_allreduce),
    _Rule(
        "OMPI_MCA_coll_tuned_dynamic_rules_filename",
        lambda _: RULES_FILE,
        "large messages are summed by a segmented ring, two to three times as fast from 32 MB on",
        _tunes_allreduce,
    ),
)

_OF_HOST: Sequence[_Rule[HostFacts]] = (
    _Rule("OMP_NUM_THREADS", lambda facts: str(facts.threads), "the CPUs of the host over its ranks"),
    _Rule(
        "TF_NUM_INTRAOP_THREADS", lambda facts: str(facts.threads), "the same for TensorFlow, which does not read the other one"
    ),
    _Rule(
        "OMPI_MCA_mpi_yield_when_idle",
        lambda _: "1",
        "who waits leaves its CPU to others, such as Horovod's thread of the other rank",
        lambda facts: facts.over_mpi,
    ),
    _Rule(
        "MALLOC_MMAP_THRESHOLD_",
        lambda facts: str(_OLD_THRESHOLD if facts.glibc < _OLD_GLIBC else _THRESHOLD),
        "freed tensors are kept for the next step instead of going back to the kernel, which clears each page again",
        lambda facts: bool(facts.glibc),
    ),
    _Rule("MALLOC_TRIM_THRESHOLD_", lambda _: str(_TRIM), "the same for the end of the heap", lambda facts: bool(facts.glibc)),
)


def of_job(facts: JobFacts) -> tuple[Setting, ...]:
    """What all ranks get alike. Algorithms of collectives must be the same on all: ranks that disagree wait for ever."""
    return _settings(_OF_JOB, facts)


def of_host(facts: HostFacts) -> tuple[Setting, ...]:
    """What the ranks of a host get."""
    return _settings(_OF_HOST, facts)


def unset(settings: Iterable[Setting], *environs: Mapping[str, str]) -> tuple[Setting, ...]:
    """Those whose name none of the environments has: what the user has set stays."""
    return tuple(each for each in settings if not any(each.name in environ for environ in environs))


def laid_over(settings: Sequence[Setting], tuned: Mapping[str, str], reason: str) -> tuple[Setting, ...]:
    """The settings with other values for some of them, and with those that are new, for one ``reason``."""
    changed = [replace(each, value=tuned[each.name], reason=reason) if each.name in tuned else each for each in settings]
    names = {each.name for each in settings}
    return (*changed, *(Setting(name, value, reason) for name, value in tuned.items() if name not in names))


def chooses_algorithms(environ: Mapping[str, str], launcher_args: Sequence[str], files: Iterable[str]) -> bool:
    """Whether anybody says something about Open MPI's collectives: variables, the launcher's arguments, parameter files. Pure.

    ``files`` are the texts of the parameter files.
    """
    lines = (line.strip() for text in files for line in text.splitlines())
    return (
        any(name.startswith("OMPI_MCA_coll") for name in environ)
        or any(word.startswith("coll") for word in launcher_args)
        or any(line.startswith("coll") for line in lines)
    )


def tunes_malloc(environ: Mapping[str, str]) -> bool:
    """Whether the user says something about the C library's memory: then none of it is ours to say."""
    ours = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return any(name in environ for name in ours) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")


def parameter_files(prefix: str, home: str) -> tuple[str, ...]:
    """The texts of Open MPI's parameter files (the site's and the user's) that can be read."""
    paths = [f"{prefix or '/usr'}/etc/openmpi-mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf"]
    paths += [f"{home}/.openmpi/mca-params.conf"] if home else []
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return tuple(texts)


def glibc() -> tuple[int, ...]:
    """The version of this process's C library if it is glibc, else nothing."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else ()
    except (ValueError, OSError):
        return ()


def _settings(rules: Sequence[_Rule[_Facts]], facts: _Facts) -> tuple[Setting, ...]:
    return tuple(Setting(rule.name, rule.value(facts), rule.reason) for rule in rules if rule.when(facts))
