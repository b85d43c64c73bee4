"""One parser for every dialect of hostfile; ``dialects`` writes them.

A line is read by itself, so dialects may be mixed: ``host``, ``host slots=4 max_slots=8``, ``host:4``, ``user@host port=2222``,
``[fd00::1]:4``, ``node[01-16]:4``, ``a:2,b:2``, ``hostA 2 hostB 4``. One rule decides about repeated hosts and slots:

1. A host that is only ever named bare has one slot for each time it is named (PBS and LSF write slots this way).
2. A host whose slots are stated is named once. Naming it again, in any style, is a mistake.
3. Slots are positive. To leave a host out, comment its line out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch import Host, nodelist

#: What a host name consists of: letters, digits, '.', '_' and '-', beginning with a letter or a digit. IPv6 has its own form.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)

MAX_SLOTS = 100_000

ACCEPTED = "'node01 slots=4', 'node01:4', 'alice@node01 slots=4 port=2222', '[fd00::1]:4' or 'node[01-16]:4'"

#: Spelling -> what it means: Open MPI's, Horovod's, DeepSpeed's, Hydra's.
_KEYS = {
    **dict.fromkeys(("slots", "slot", "cpu", "cpus", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max", "cpus_max", "cpus-max"), "max_slots"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
}


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a hostfile: ``where`` is ``hosts:3``, ``line`` its number (0 for the file as a whole)."""

    where: str
    line: int
    text: str
    problem: str
    hint: str

    def __str__(self) -> str:
        shown = "" if not self.text or self.text in self.problem else f"\n    {self.text}"
        return f"{self.where}: {self.problem}{shown}"


class HostfileError(UsageError):
    """All mistakes of one hostfile."""

    SHOWN = 20

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        lines = [str(mistake) for mistake in mistakes[: self.SHOWN]]
        lines += [f"... and {len(mistakes) - self.SHOWN} more"] if len(mistakes) > self.SHOWN else []
        hints = list(dict.fromkeys(mistake.hint for mistake in mistakes if mistake.hint))
        super().__init__("\n".join(lines), "; ".join(hints[:3]))

    def __reduce__(self) -> tuple[type[HostfileError], tuple[tuple[Mistake, ...]]]:
        return type(self), (self.mistakes,)


@dataclass(frozen=True)
class Hosts:
    """A parsed hostfile. ``source`` is what to call it in messages."""

    hosts: tuple[Host, ...]
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class _Entry:
    """A host as one line names it; what the line does not say is None."""

    where: str
    line: int
    text: str
    name: str
    slots: int | None = None
    max_slots: int | None = None
    user: str = ""
    port: int | None = None


class _BadLineError(Exception):
    def __init__(self, problem: str, hint: str = f"write {ACCEPTED}") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


def read(path: str | Path, *, strict: bool = False) -> Hosts:
    """Parse a file. A file that is not there is a mistake, never an empty or a local list."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(
            f"hostfile '{path}' does not exist (looked in {Path(path).absolute().parent})",
            f"create it with lines such as 'node01 slots=4', or name the hosts: -H node01:4,node02:4 (now: {path})",
        ) from None
    except IsADirectoryError:
        raise UsageError(f"hostfile '{path}' is a directory", "name a file with lines such as 'node01 slots=4'") from None
    except PermissionError:
        raise UsageError(f"hostfile '{path}' may not be read by this user", f"try: chmod +r {path}") from None
    except OSError as error:
        raise UsageError(f"hostfile '{path}' cannot be read: {error.strerror}", "check its path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise HostfileError(
            [
                Mistake(
                    f"{path}:{line}", line, "", f"byte {error.object[error.start]:#04x} is not UTF-8 text", "is it a hostfile?"
                )
            ]
        ) from None
    return parse(text, source=str(path), strict=strict)


def parse(text: str, *, source: str = "hosts", strict: bool = False) -> Hosts:
    """Parse the text of a hostfile.

    Args:
        strict: a bare name is a mistake instead of one slot with a warning.

    Raises:
        HostfileError: with every mistake of the text.
    """
    lines = [(f"{source}:{number}", number, line) for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1)]
    return _collect(lines, source, strict, empty_hint="add lines such as 'node01 slots=4'")


def parse_option(text: str, *, source: str = "-H", strict: bool = False) -> Hosts:
    """Parse a list on the command line: ``node1:2,node2:2``, ``node[01-16]:4`` or ``localhost``."""
    items = [(f"{source}, item {number}", 1, item) for number, item in enumerate(nodelist.split(text), 1)]
    empty = [
        Mistake(where, line, text, "empty host name between commas", "write for example -H node1:2,node2:2")
        for where, line, item in items
        if not item.strip()
    ]
    if empty:
        raise HostfileError(empty)
    hint = "write for example -H node1:2,node2:2"
    return replace(_collect(items, source, strict, empty_hint=hint), source=f"{source} {text}" if len(text) < 40 else source)


def _collect(lines: Iterable[tuple[str, int, str]], source: str, strict: bool, empty_hint: str) -> Hosts:
    entries: list[_Entry] = []
    mistakes: list[Mistake] = []
    for where, number, line in lines:
        content = re.split(r"#|//", line, maxsplit=1)[0].strip(" \t")
        if not content:
            continue
        try:
            entries += _entries(content, where, number)
        except _BadLineError as bad:
            mistakes.append(Mistake(where, number, _shown(content), bad.problem, bad.hint))
        if len(entries) > nodelist.MAX_NAMES:
            mistakes.append(Mistake(where, number, "", f"more than {nodelist.MAX_NAMES} hosts", "is it a hostfile?"))
            break
    hosts, warnings = _merge(entries, mistakes, strict)
    if mistakes:
        raise HostfileError(sorted(mistakes, key=lambda mistake: mistake.line))
    if not hosts:
        raise HostfileError([Mistake(source, 0, "", "no host in it", empty_hint)])
    return Hosts(hosts, source, warnings)


def _entries(content: str, where: str, number: int) -> list[_Entry]:
    words = re.split(r"[ \t]+", re.sub(r"[ \t]*=[ \t]*", "=", content))
    if len(words) > 1 and len(words) % 2 == 0 and all(re.fullmatch("[0-9]+", word, re.ASCII) for word in words[1::2]):
        pairs = zip(words[::2], words[1::2], strict=True)  # LSF: hostA 2 hostB 4
        return [entry for host, slots in pairs for entry in _line([host, f"slots={slots}"], content, where, number)]
    return _line(words, content, where, number)


def _line(words: list[str], content: str, where: str, number: int) -> list[_Entry]:
    first, *rest = words
    stated: dict[str, str] = {}
    for word in rest:
        key, equals, _ = word.partition("=")
        meaning = _KEYS.get(key.lower())
        if not equals:
            raise _BadLineError(f"unexpected word '{_shown(word)}' after the host name", f"write {ACCEPTED}, one host a line")
        if meaning is None:
            raise _BadLineError(
                f"unknown setting '{_shown(key)}' in '{_shown(word)}'", "use slots=, max_slots=, user= and port="
            )
        if meaning in stated:
            raise _BadLineError(f"'{meaning}' is given twice", f"give it once: write {ACCEPTED}")
        stated[meaning] = word
    entries = []
    for item in nodelist.split(first):
        user, names, colon_slots = _spec(item, first)
        if colon_slots is not None and "slots" in stated:
            raise _BadLineError(
                f"slots are given twice, '{_shown(item)}' and '{_shown(stated['slots'])}'", f"write '{names[0]} slots=4'"
            )
        if user and "user" in stated:
            raise _BadLineError(
                f"the user is given twice, '{_shown(item)}' and '{_shown(stated['user'])}'", "write 'alice@node01'"
            )
        slots, shown = (f"slots={colon_slots}", item) if colon_slots is not None else (stated.get("slots"), None)
        entry = _Entry(
            where,
            number,
            _shown(content),
            names[0],
            slots=_positive("slots", slots, names[0], MAX_SLOTS, shown),
            max_slots=_positive("max_slots", stated.get("max_slots"), names[0], MAX_SLOTS),
            port=_positive("port", stated.get("port"), names[0], 65535),
            user=user or _user(stated.get("user", "=").partition("=")[2]),
        )
        if entry.max_slots is not None and entry.max_slots < (entry.slots or 1):
            raise _BadLineError(
                f"max_slots={entry.max_slots} is less than slots={entry.slots or 1}", "raise max_slots or leave it out"
            )
        entries += [replace(entry, name=name) for name in names]
    return entries


def _spec(item: str, first: str) -> tuple[str, list[str], str | None]:
    """``user@name-or-range:slots`` -> user, names, text after the colon."""
    if not item:
        raise _BadLineError(f"empty host name in '{_shown(first)}'")
    user, at, rest = item.rpartition("@")
    if at:
        user = _user(user) or _fail("the user before '@' is empty", "write 'alice@node01 slots=4'")
    if rest.startswith("["):
        address, closed, tail = rest[1:].partition("]")
        if not closed:
            raise _BadLineError(f"'[' without ']' in '{_shown(item)}'")
        if tail and not tail.startswith(":"):
            raise _BadLineError(f"unexpected '{_shown(tail)}' after the address in '{_shown(item)}'", "write '[fd00::1]:4'")
        return user, [_ipv6(address)], tail[1:] if tail else None
    if rest.count(":") > 1 and "[" not in rest:
        raise _BadLineError(f"'{_shown(rest)}' looks like an IPv6 address without brackets", "write '[fd00::1]:4'")
    pattern, colon, slots = rest.partition(":")
    try:
        names = nodelist.expand(pattern)
    except nodelist.NodelistError as error:
        raise _BadLineError(_shown(str(error), 160), "write 'node[01-16]:4'") from None
    for name in names:
        check_name(name)
    return user, names, slots if colon else None


def check_name(name: str) -> str:
    """The name, if it is one that no shell and no ssh can take for an option or a command."""
    if NAME.fullmatch(name) is None:
        if name.startswith("-"):
            raise _BadLineError(f"host name '{_shown(name)}' begins with '-'", "a host name begins with a letter or a digit")
        if not name:
            raise _BadLineError("the host name is empty")
        if len(name) > 253:
            raise _BadLineError(f"host name '{_shown(name)}' is longer than 253 characters")
        odd = next((char for char in name if re.fullmatch(r"[A-Za-z0-9._-]", char, re.ASCII) is None), name[0])
        raise _BadLineError(
            f"host name '{_shown(name)}' contains '{_shown(odd)}'"
            if odd != name[0]
            else f"'{_shown(name)}' is not a host name",
            "a host name has letters, digits, '.', '_' and '-', and begins with a letter or a digit",
        )
    if name.isdigit():
        raise _BadLineError(f"'{_shown(name)}' is a number, not a host name", "write 'node01 slots=4'")
    return name


def _ipv6(address: str) -> str:
    try:
        if "%" in address:
            raise ValueError
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        raise _BadLineError(f"'[{_shown(address)}]' is not an IPv6 address", "write '[fd00::1]:4'") from None


def _user(user: str) -> str:
    if user and USER.fullmatch(user) is None:
        raise _BadLineError(f"'{_shown(user)}' is not a user name", "write 'alice@node01 slots=4'")
    return user


def _fail(problem: str, hint: str) -> str:
    raise _BadLineError(problem, hint)


def _positive(key: str, word: str | None, name: str, limit: int, shown: str | None = None) -> int | None:
    """The number in ``slots=4``."""
    if word is None:
        return None
    value = word.partition("=")[2]
    example = f"write '{name} {key}={4 if key != 'port' else 2222}'"
    if re.fullmatch("[0-9]{1,9}", value, re.ASCII) is None or int(value) == 0:
        zero = f"; to leave {name} out, comment its line out" if value.strip("0") == "" and value and key == "slots" else ""
        raise _BadLineError(f"'{key}' must be a positive integer, got '{_shown(shown or word)}'", example + zero)
    if int(value) > limit:
        raise _BadLineError(f"'{key}' is at most {limit}, got '{_shown(shown or word)}'", example)
    return int(value)


def _shown(text: str, limit: int = 80) -> str:
    """Text of the user's as it may stand in a message: one line, printable, not endless."""
    clean = (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    )
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."


def _merge(entries: list[_Entry], mistakes: list[Mistake], strict: bool) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    named: dict[str, list[_Entry]] = {}
    for entry in entries:
        named.setdefault(entry.name.lower(), []).append(entry)
    hosts: list[Host] = []
    alone: list[_Entry] = []
    for first, *others in named.values():
        stated = [entry for entry in (first, *others) if entry.slots is not None or entry.max_slots is not None]
        if others and stated:
            again = others[0]
            mistakes.append(
                Mistake(
                    again.where,
                    again.line,
                    again.text,
                    f"host '{again.name}' is named again, first on {first.where}, and its slots are stated",
                    f"name '{first.name}' once, with all its slots: '{first.name} slots=4'",
                )
            )
            continue
        differing = [entry for entry in others if (entry.user, entry.port) != (first.user, first.port)]
        if differing:
            again = differing[0]
            problem = f"host '{again.name}' has another user or port on {first.where}"
            mistakes.append(
                Mistake(again.where, again.line, again.text, problem, f"name '{first.name}' with one user and one port")
            )
            continue
        if first.slots is None and not others:
            alone.append(first)
        slots = first.slots if first.slots is not None else 1 + len(others)
        hosts.append(Host(first.name, slots, first.user, first.port, first.max_slots))
    if strict:
        mistakes += [
            Mistake(
                entry.where,
                entry.line,
                entry.text,
                f"'{entry.name}' has no slots",
                f"write '{entry.name} slots=4' or '{entry.name}:4'",
            )
            for entry in alone
        ]
    return tuple(hosts), _warnings(alone)


def _warnings(alone: list[_Entry]) -> tuple[str, ...]:
    if not alone:
        return ()
    first = alone[0]
    more = f" (and {len(alone) - 1} more hosts)" if len(alone) > 1 else ""
    return (f"{first.where}: '{first.name}'{more} has no slots, taken as 1; write '{first.name} slots=4' or '{first.name}:4'",)
