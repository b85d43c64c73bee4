"""What the benchmarks find: values, and files of JSON that other commands read."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from hvdtrain.errors import UsageError

#: Raised when a field changes its meaning.
FORMAT = 1


@dataclass(frozen=True)
class Timing:
    """Seconds that something took, over ``count`` tries."""

    median_s: float
    fastest_s: float
    #: the first and the third quartile: half of the tries lie between them
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        return cls(median, min(seconds), low, high, len(seconds))

    @property
    def noise(self) -> float:
        """The distance of the quartiles, as a part of the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


@dataclass(frozen=True)
class Setup:
    """Where and when something was measured."""

    #: seconds since 1970
    time: float
    #: the host of each rank
    hosts: tuple[str, ...]
    #: who started the ranks
    launcher: str
    #: of rank 0's host
    cpu: str
    cores: int
    memory_bytes: int
    threads: int
    versions: Mapping[str, str]

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def nodes(self) -> int:
        return len(set(self.hosts))


@dataclass(frozen=True)
class Sum:
    """One size summed over all ranks by one carrier. A try takes as long as its slowest rank."""

    carrier: str
    #: of the array that each rank brings
    bytes: int
    timing: Timing
    #: the median of each round of an alternating run
    rounds_s: tuple[float, ...]
    #: bytes / time
    algorithm_bytes_per_s: float
    #: 2 (n - 1) / n * bytes / time: what each rank has to send and receive at least
    bus_bytes_per_s: float
    #: the limit over the time: 1 is as fast as the hardware was seen to be
    share_of_limit: float | None


@dataclass(frozen=True)
class Limit:
    """The least time that the memory, or between hosts the slowest link, was seen to need for the traffic of a sum."""

    bytes: int
    seconds: float
    #: "memory" or "network"
    of: str
    #: of each round of an alternating run
    rounds_s: tuple[float, ...]
    #: what copying the array takes instead of going through it in place; None for a network
    copy_s: float | None = None


@dataclass(frozen=True)
class Allreduce:
    kind: ClassVar[str] = "allreduce"
    setup: Setup
    sums: tuple[Sum, ...]
    limits: tuple[Limit, ...]
    #: carrier -> what it is
    carriers: Mapping[str, str]
    #: carrier -> why it was left out
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Route:
    """From one host to another."""

    source: str
    target: str
    #: of 4 bytes, one way
    latency_s: float
    bytes_per_s: float
    #: of the largest message that was timed
    message_bytes: int


@dataclass(frozen=True)
class Slow:
    """What is slower than the others: a host, or one route."""

    #: "node3", or "node1 -> node2"
    what: str
    #: "sends", "receives", "sends and receives", or "route"
    how: str
    bytes_per_s: float
    #: what the others have
    usual_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    kind: ClassVar[str] = "link"
    setup: Setup
    routes: tuple[Route, ...]
    slow: tuple[Slow, ...]


@dataclass(frozen=True)
class Step:
    """The recipe's step with one exchange."""

    #: "none" (each rank alone, with its part of the batch), "horovod", "shared", "auto"
    exchange: str
    #: what the adapter said of it
    chosen: str
    #: of the slowest rank
    step: Timing
    #: the median of each round
    rounds_s: tuple[float, ...]
    #: of a step: waiting for the batch; forward, backward and what is exchanged meanwhile; the optimizer
    data_s: float
    compute_s: float
    #: None where the framework does all of a step in one call
    update_s: float | None
    #: the step with this exchange less the one without; None of the latter
    exposed_s: float | None
    samples_per_s: float


@dataclass(frozen=True)
class Steps:
    kind: ClassVar[str] = "step"
    setup: Setup
    recipe: str
    settings: Mapping[str, Any]
    framework: str
    batch_size: int
    steps: tuple[Step, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Loading:
    kind: ClassVar[str] = "loader"
    setup: Setup
    recipe: str
    settings: Mapping[str, Any]
    framework: str
    batch_size: int
    #: samples a second of all ranks together: the source by itself, through the loader, and by a step that has its batch at hand
    source_per_s: float
    loader_per_s: float
    step_per_s: float
    #: "source", "loader" or "step"
    bottleneck: str
    #: how the loader loads, and why
    way: str


Report = Allreduce | Link | Steps | Loading
_KINDS: dict[str, type[Report]] = {report.kind: report for report in (Allreduce, Link, Steps, Loading)}


def to_json(report: Report) -> dict[str, Any]:
    return {"hvdtrain_bench": FORMAT, "kind": report.kind, **dataclasses.asdict(report)}


def from_json(values: Mapping[str, Any]) -> Report:
    """Raises ValueError if this is no report of ours."""
    if values.get("hvdtrain_bench") != FORMAT or values.get("kind") not in _KINDS:
        raise ValueError("it is no report of this version's hvdtrain bench")
    try:
        report: Report = build(_KINDS[values["kind"]], values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing or odd: {error}") from None
    return report


def write(path: Path, report: Report) -> None:
    with _told(path):
        path.write_text(json.dumps(to_json(report), indent=1) + "\n", encoding="utf-8")


def check(path: Path) -> None:
    """Raises UsageError if ``path`` cannot be written, which is left as it is: before something is measured for it."""
    with _told(path):
        if not path.exists():
            target = Path(os.path.realpath(path))  # of a link, what it leads to is made and removed
            target.open("xb").close()
            target.unlink()
        elif path.is_file() or path.is_dir():  # whoever reads a pipe would see it end
            path.open("ab").close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> Report:
    """Raises UsageError if ``path`` holds no report."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read: {why}", f"hvdtrain bench ... --json {path} writes it") from None


def build(kind: Any, value: Any) -> Any:
    """``value`` of JSON as one of type ``kind``: what ``dataclasses.asdict`` was given."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: build(hints[field.name], value[field.name]) for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if origin is tuple:
        return tuple(build(arguments[0], item) for item in value)
    if origin is types.UnionType:
        return None if value is None else build(arguments[0], value)
    return value
