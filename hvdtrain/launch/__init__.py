"""Start a job on many hosts: a hostfile becomes ``Host`` values, a ``Job`` becomes a ``Command``.

Everything here is a value or a pure function. Only ``hvdtrain.launch.process`` starts anything, so what ``--dry-run`` prints
is what ``run`` does, and nearly all of launching is tested with ``==``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from hvdtrain.errors import UsageError, shown
from hvdtrain.world import is_identity

#: Linux's limit for one argument, with the zero byte at its end.
MAX_ARGUMENT = 128 * 1024

#: And for all arguments and variables of a process, less what this shell's own variables may take of it.
MAX_COMMAND = 2 * 1024 * 1024 - 64 * 1024

#: Time for a rank to end by itself when the job is ended; Open MPI kills after one second by default.
GRACE_S = 0.7

#: More ranks than this in one job is taken for a slip of the pen: every rank becomes a ``Slot``.
MAX_RANKS = 250_000

Controller = Literal["mpi", "gloo"]


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it may take. ``name`` is a checked host name, IPv4 or (without brackets) IPv6 address.

    ``devices`` are the numbers of the GPUs that its local ranks get, one each; empty: those that the host offers, in order.
    """

    name: str
    slots: int = 1
    user: str = ""
    port: int | None = None
    max_slots: int | None = None
    devices: tuple[int, ...] = ()

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.name

    @property
    def address(self) -> str:
        """The name as it can stand before ``:N``: an IPv6 address in brackets."""
        return f"[{self.name}]" if self.is_ipv6 else self.name

    @property
    def login(self) -> str:
        """What ssh is to be told: ``user@name``, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Slot:
    """The place of one rank. ``cross_rank`` counts the hosts that have this local rank, as Horovod does."""

    rank: int
    host: Host
    local_rank: int
    local_size: int
    node_rank: int
    cross_rank: int


@dataclass(frozen=True)
class Ssh:
    """How to reach other hosts. ``options`` are the user's own ssh arguments, kept one item each."""

    port: int | None = None
    identity_file: str = ""
    options: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        port = ("-p", str(self.port)) if self.port is not None else ()
        identity = ("-i", self.identity_file) if self.identity_file else ()
        return (*port, *identity, *self.options)


@dataclass(frozen=True)
class Elastic:
    """Keep going between ``min_np`` and ``max_np`` ranks; the script prints a ``host:slots`` line for each usable host."""

    min_np: int
    max_np: int | None
    discovery_script: str


@dataclass(frozen=True)
class Job:
    """What to run where: ``np`` ranks of ``argv``, filling the hosts in order.

    ``env`` holds what every rank gets on top of what its host gives. ``launch_dir`` is a folder of this job's own, on this
    machine, for what its launcher reads and runs. ``tagged``: the ranks run under our relay, and the launcher is to mark
    each chunk of output with its rank if it can. ``subnet`` is that of ``nics``, where hosts name their interfaces differently.
    ``here`` are this machine's own names, in small letters. ``stop_s``: how long the ranks may take to stop in order when they
    are asked to; 0 if they know no such thing.
    """

    argv: tuple[str, ...]
    hosts: tuple[Host, ...]
    np: int
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    controller: Controller = "mpi"
    cwd: str = ""
    nics: tuple[str, ...] = ()
    subnet: str = ""
    ssh: Ssh = Ssh()
    grace_s: float = GRACE_S
    stop_s: float = 0.0
    launcher_args: tuple[str, ...] = ()
    launch_dir: str = ""
    elastic: Elastic | None = None
    tagged: bool = False
    here: frozenset[str] = frozenset()

    @property
    def is_remote(self) -> bool:
        """Whether ranks may start on another machine. Nobody knows where those of an elastic job will."""
        return self.elastic is not None or not all(map(self.is_here, self.hosts))

    def is_here(self, host: Host) -> bool:
        return is_here(host.name, self.here)

    def file(self, name: str) -> str:
        """Where a file for the launcher goes."""
        return f"{self.launch_dir}/{name}"


def size_of(word: str) -> int:
    """Bytes of an argument or a variable, with the zero byte at its end."""
    return len(word.encode(errors="surrogateescape")) + 1


def check_lengths(argv: Sequence[str], hint: str) -> None:
    """UsageError if an argument is longer than the kernel takes; ``hint`` says what makes it shorter."""
    for before, word in zip(("", *argv), argv, strict=False):
        size = size_of(word)
        if size > MAX_ARGUMENT:
            what = f"the value of {before}" if before.startswith("-") else "an argument"
            raise UsageError(
                f"{what} would be {size - 1:,} bytes long, and Linux takes {MAX_ARGUMENT - 1:,} (it begins {shown(word, 40)!r})",
                hint,
            )


@dataclass(frozen=True)
class Command:
    """What to start. With ``inherit`` the process keeps our environment and ``env`` comes on top; else ``env`` is all it gets.

    ``files`` (path -> text) are written before the start; those that begin with ``#!`` are programs. ``secrets`` are names in
    ``env`` whose values are never shown. ``passes_on``: the process hands SIGUSR1 on to all ranks. ``notes`` are told beside the
    printed command, a line each.

    Raises:
        UsageError: an argument is longer than the kernel takes.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    inherit: bool = True
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    secrets: frozenset[str] = frozenset()
    passes_on: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_lengths(self.argv, "use fewer hosts, neighbours with equal slots, whole hosts instead of chosen devices")
        variables = [f"{name}={value}" for name, value in self.env.items()]
        for name, text in zip(self.env, variables, strict=True):
            if size_of(text) > MAX_ARGUMENT:
                raise UsageError(
                    f"the variable {name} would be {size_of(text):,} bytes long, and Linux takes {MAX_ARGUMENT:,}",
                    "leave it out, or write it to a file that the program reads",
                )
        size = sum(size_of(word) + 8 for word in (*self.argv, *variables))
        if size > MAX_COMMAND:
            raise UsageError(
                f"the arguments and variables would be {size:,} bytes long in all, and a process takes {MAX_COMMAND:,}",
                "write them to a file that the program reads",
            )

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the process, where ``base`` is ours."""
        inherited = {name: value for name, value in base.items() if not is_identity(name)} if self.inherit else {}
        return {**inherited, **self.env}

    def shell(self, base: Mapping[str, str]) -> str:
        """One line that does the same when it is pasted into a shell whose environment is ``base``.

        A value that the shell has already is written ``NAME="$NAME"``: that is short, and keeps it out of logs. So is a
        secret, which has to be exported before the line is pasted.
        """
        words: list[str] = []
        for name, value in sorted(self.env.items()):
            before = base.get(name, "")
            if not _PLAIN_NAME.fullmatch(name):  # it has no "$NAME", and may hold anything
                shown_value = f'"$(printenv -- {shlex.quote(name)})"' if name in self.secrets else shlex.quote(value)
                words.append(f"{shlex.quote(f'{name}=')}{shown_value}")
            elif name in self.secrets and (before != value or not self.inherit):
                words.append(f'{name}="${name}"')
            elif before and value == before:
                words += [] if self.inherit else [f'{name}="${name}"']
            elif before and value.endswith(f":{before}"):
                words.append(f'{name}={shlex.quote(value.removesuffix(before))}"${name}"')
            else:
                words.append(f"{name}={shlex.quote(value)}")
        drops = [word for name in sorted(base) if is_identity(name) and name not in self.env for word in ("-u", name)]
        if words or drops or not self.inherit:
            words = ["env", *(drops if self.inherit else ("-i",)), *words]
        return " ".join([*words, shlex.join(self.argv)])

    def script(self, base: Mapping[str, str]) -> str:
        """The notes as comments, the files as here-documents, then the line of ``shell``."""
        parts = [f"# {' '.join(note.split())}\n" for note in self.notes]
        for path, text in self.files.items():
            end = "HVDTRAIN_END"
            while end in text:
                end += "_"
            parts.append(f"mkdir -p {shlex.quote(str(Path(path).parent))}\n")
            parts.append(f"cat > {shlex.quote(path)} <<'{end}'\n{text.removesuffix(chr(10))}\n{end}\n")
            parts.append(f"chmod +x {shlex.quote(path)}\n" if text.startswith("#!") else "")
        return "".join(parts) + self.shell(base)


_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Launcher(Protocol):
    """Makes a command of a job. Its facts (paths, version of the MPI, are we root) are given to its constructor."""

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str:
        """Why it cannot be used here, or an empty string."""
        ...

    def command(self, job: Job) -> Command:
        """Pure. UsageError if this launcher cannot do what the job asks for."""
        ...


#: The file that starts our small programs on every host.
START_FILE = str(Path(__file__).resolve().with_name("start.py"))


def start_argv(python: str) -> tuple[str, ...]:
    """How to start one of our small programs: by file name and without site-packages, which takes 20 ms instead of 300."""
    return (python, "-S", "-E", START_FILE)


def is_this_machine(name: str) -> bool:
    """Whether the name says by itself that it is this machine: localhost, 127.x.x.x or ::1. Nothing is resolved here."""
    return name.lower() in ("localhost", "::1") or (name.startswith("127.") and name.replace(".", "").isdigit())


def is_here(name: str, own: frozenset[str]) -> bool:
    """Whether the name is this machine's: by itself, or as one of its ``own`` names, which are in small letters."""
    return is_this_machine(name) or name.lower() in own


def local_hosts(hosts: Sequence[Host], here: frozenset[str], user: str) -> tuple[Host, ...]:
    """The hosts with this machine named as every launcher knows it: ``localhost``, without a user.

    A machine's own name may resolve to nothing, or to an address that a launcher does not take for its own; so it stays only
    where other hosts have to know it. ``user`` is who we are.

    Raises:
        UsageError: ranks on this machine for another user, whom no launcher would ask for.
    """
    named = []
    for host in hosts:
        if not is_here(host.name, here):
            named.append(host)
            continue
        if host.user not in ("", user):
            raise UsageError(
                f"ranks on this machine run as {user}, not as {host.user} ({host.login})", f"leave '{host.user}@' out"
            )
        named.append(replace(host, user="", name=host.name if host.name.lower() in here and len(hosts) > 1 else "localhost"))
    return tuple(named)


def colon_list(hosts: Sequence[Host]) -> str:
    """``a:2,b:1``, as most launchers take their hosts."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def fit(hosts: Sequence[Host], np: int, *, source: str, oversubscribe: bool = False) -> tuple[Host, ...]:
    """The hosts that ``np`` ranks use, each with exactly the slots they use; every launcher is told these numbers.

    With ``oversubscribe`` the ranks that are left over go round the hosts, one by one. UsageError if they do not fit.
    """
    if np < 1:
        raise UsageError(f"-np must be a positive integer, got {np}", "write for example -np 2")
    if np > MAX_RANKS:
        raise UsageError(f"{np} ranks are more than a job can have ({MAX_RANKS})", "lower -np, or the slots")
    total = sum(host.slots for host in hosts)
    if np > total and not oversubscribe:
        more = f"write '{hosts[0].name} slots={np}'" if len(hosts) == 1 else "raise the slots"
        raise UsageError(too_many(hosts, np, total, source), f"use -np {total}, {more}, or add --oversubscribe")
    rounds, rest = divmod(max(np - total, 0), len(hosts))
    used, left = [], np
    for number, host in enumerate(hosts):
        slots = min(left, host.slots + rounds + (number < rest))
        if slots == 0:
            break
        used.append(replace(host, slots=slots, devices=host.devices[:slots]))
        left -= slots
    return tuple(used)


def too_many(hosts: Sequence[Host], np: int, total: int, source: str) -> str:
    """The sentence for more ranks than slots."""
    offered = [f"{host.name}: {host.slots}" for host in hosts[:8]]
    offered += [f"... {len(hosts) - 8} more hosts"] if len(hosts) > 8 else []
    slots = "slot" if total == 1 else "slots"
    return f"{np} processes requested, '{source}' offers {total} {slots} ({', '.join(offered)})"


def place(hosts: Sequence[Host]) -> tuple[Slot, ...]:
    """Ranks in order: all slots of the first host, then those of the next."""
    slots: list[Slot] = []
    seen: dict[int, int] = {}  # local rank -> hosts that had it
    for node_rank, host in enumerate(hosts):
        for local_rank in range(host.slots):
            cross_rank = seen.get(local_rank, 0)
            seen[local_rank] = cross_rank + 1
            slots.append(Slot(len(slots), host, local_rank, host.slots, node_rank, cross_rank))
    return tuple(slots)
