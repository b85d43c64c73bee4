"""One parser for every dialect of hostfile; ``dialects`` writes them.

A line is read by itself, so dialects may be mixed: ``host``, ``host slots=4 max_slots=8``, ``host:4``, ``user@host port=2222``,
``[fd00::1]:4``, ``node[01-16]:4``, ``a:2,b:2``, ``hostA 2 hostB 4``. One rule decides about repeated hosts and slots:

1. A host that is only ever named bare has one slot for each time it is named (PBS and LSF write slots this way).
2. A host whose slots are stated is named once. Naming it again, in any style, is a mistake; so is another name of this machine
   (``localhost``, ``127.0.0.1``, ``[::1]``).
3. Slots are positive. To leave a host out, comment its line out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import MAX_RANKS, Host, hostnames, inputfile, nodelist

#: After so many mistakes the rest of a file is not read: it is something else than a hostfile.
MAX_MISTAKES = 1000

ACCEPTED = "'node01 slots=4', 'node01:4', 'alice@node01 slots=4 port=2222', '[fd00::1]:4' or 'node[01-16]:4'"

#: Spelling -> what it means: Open MPI's, Horovod's, DeepSpeed's, Hydra's.
_KEYS = {
    **dict.fromkeys(("slots", "slot", "cpu", "cpus", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max", "cpus_max", "cpus-max"), "max_slots"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
}
_BLANKS = re.compile(r"[ \t]+")
_COMMENT = re.compile(r"#|//")
_LINE_END = re.compile(r"\r\n|\r|\n")
_DIGITS = re.compile(r"[0-9]+", re.ASCII)


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a hostfile: ``where`` is ``hosts:3``, ``line`` its number (0 for the file as a whole)."""

    where: str
    line: int
    text: str
    problem: str
    hint: str

    def __str__(self) -> str:
        quoted = "" if not self.text or self.text in self.problem else f"\n    {self.text}"
        return f"{self.where}: {self.problem}{quoted}"


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


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a file, or an item of a list, without its comment."""

    where: str
    number: int
    text: str

    def mistake(self, problem: str, hint: str) -> Mistake:
        return Mistake(self.where, self.number, shown(self.text), problem, hint)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A host as one line names it; what the line does not say is None."""

    line: _Line
    name: str
    slots: int | None = None
    max_slots: int | None = None
    user: str = ""
    port: int | None = None


def read(path: str | Path, *, source: str = "", strict: bool = False) -> Hosts:
    """Parse a file, a pipe, or ``-`` (standard input). A file that is not there is a mistake, never an empty or a local list."""
    source = source or ("stdin" if str(path) == "-" else str(path))
    named = f"'{source}'" if source == str(path) else source
    try:
        data = inputfile.read(path)
    except FileNotFoundError:
        raise UsageError(
            f"hostfile {named} does not exist (looked in {Path(path).absolute().parent})",
            f"create it with lines such as 'node01 slots=4', or name the hosts: -H node01:4,node02:4 (now: {path})",
        ) from None
    except IsADirectoryError:
        raise UsageError(f"hostfile {named} is a directory", "name a file with lines such as 'node01 slots=4'") from None
    except PermissionError:
        raise UsageError(f"hostfile {named} may not be read by this user", f"try: chmod +r {path}") from None
    except OSError as error:
        raise UsageError(f"hostfile {named} cannot be read: {error.strerror}", "name the hosts: -H node01:4,node02:4") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        problem = f"byte {data[error.start]:#04x} is not UTF-8 text"
        raise HostfileError([_Line(f"{source}:{number}", number, "").mistake(problem, "is it a hostfile?")]) from None
    return parse(text, source=source, strict=strict)


def parse(text: str, *, source: str = "hosts", strict: bool = False) -> Hosts:
    """Parse the text of a hostfile.

    Args:
        strict: a bare name is a mistake instead of one slot with a warning.

    Raises:
        HostfileError: with the mistakes of the text, one for each line that has any.
    """
    contents = (_COMMENT.split(line, maxsplit=1)[0].strip(" \t") for line in _LINE_END.split(text))
    lines = (_Line(f"{source}:{number}", number, content) for number, content in enumerate(contents, 1) if content)
    return _collect(lines, source, strict, hint="add lines such as 'node01 slots=4'")


def parse_option(text: str, *, source: str = "-H", strict: bool = False) -> Hosts:
    """Parse a list on the command line: ``node1:2,node2:2``, ``node[01-16]:4`` or ``localhost``."""
    items = (_Line(f"{source}, item {number}", 1, item.strip(" \t")) for number, item in enumerate(nodelist.split(text), 1))
    found = _collect(items, source, strict, hint="write for example -H node1:2,node2:2")
    return replace(found, source=f"{source} {text}") if len(text) < 40 else found


def _collect(lines: Iterable[_Line], source: str, strict: bool, hint: str) -> Hosts:
    """The hosts of all lines, or all mistakes."""
    named: dict[str, list[_Entry]] = {}
    mistakes: list[Mistake] = []
    slots = 0
    for line in lines:
        entries: list[_Entry] = []
        try:
            entries = list(islice(_entries(line), nodelist.MAX_NAMES + 1))
        except UsageError as error:
            mistakes.append(line.mistake(error.message, error.hint))
        for entry in entries:
            named.setdefault(hostnames.machine(entry.name), []).append(entry)
        slots += sum(entry.slots or 1 for entry in entries)
        if max(len(entries), len(named)) > nodelist.MAX_NAMES or slots > MAX_RANKS or len(mistakes) > MAX_MISTAKES:
            beyond = f"more than {nodelist.MAX_NAMES} hosts, {MAX_RANKS} slots or {MAX_MISTAKES} mistakes"
            mistakes.append(line.mistake(beyond, "is it a hostfile?"))
            break
    mistakes += [mistake for entries in named.values() for mistake in _contradictions(entries)]
    alone = [first for first, *others in named.values() if first.slots is None and not others]
    if strict:
        mistakes += [entry.line.mistake(f"'{entry.name}' has no slots", _stating(entry)) for entry in alone]
    if mistakes:
        raise HostfileError(sorted(mistakes, key=lambda mistake: mistake.line))
    if not named:
        raise HostfileError([Mistake(source, 0, "", "no host in it", hint)])
    return Hosts(tuple(_host(*entries) for entries in named.values()), source, _warnings(alone))


def _contradictions(entries: Sequence[_Entry]) -> list[Mistake]:
    """What is wrong with one host, as all its lines name it together."""
    first, *others = entries
    if not others:
        return []
    differing = [entry for entry in others if (entry.user, entry.port) != (first.user, first.port)]
    if any(entry.slots is not None or entry.max_slots is not None for entry in entries):
        again, what = others[0], "is named again, first on {}, and its slots are stated"
        stated = [entry.slots or 1 for entry in entries]
        hint = f"name '{first.name}' once, with all its slots: '{first.name} slots={sum(stated)}'"
    elif differing:
        again, what, hint = differing[0], "has another user or port on {}", f"name '{first.name}' with one user and one port"
    else:
        return []
    where = first.line.where + (f" as '{first.name}'" if again.name.lower() != first.name.lower() else "")
    return [again.line.mistake(f"host '{again.name}' {what.format(where)}", hint)]


def _host(first: _Entry, *others: _Entry) -> Host:
    return Host(first.name, first.slots or 1 + len(others), first.user, first.port, first.max_slots)


def _warnings(alone: Sequence[_Entry]) -> tuple[str, ...]:
    if not alone:
        return ()
    more = f" (and {len(alone) - 1} more hosts)" if len(alone) > 1 else ""
    return (f"{alone[0].line.where}: '{alone[0].name}'{more} has no slots, taken as 1; {_stating(alone[0])}",)


def _stating(entry: _Entry) -> str:
    return f"write '{entry.name} slots=4' or '{entry.name}:4'"


# --- one line --------------------------------------------------------------------------------------------------------------


def _entries(line: _Line) -> Iterator[_Entry]:
    """The hosts of one line. UsageError with its first mistake."""
    words = _BLANKS.sub(" ", line.text).replace(" =", "=").replace("= ", "=").split(" ")
    if len(words) % 2 == 0 and all(_DIGITS.fullmatch(word) for word in words[1::2]):
        for host, slots in zip(words[::2], words[1::2], strict=True):  # LSF: hostA 2 hostB 4
            yield from _of_list(line, host, {"slots": (slots, f"slots={slots}")})
    else:
        yield from _of_list(line, words[0], _settings(words[1:]))


def _settings(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What the words after the host say, each with its text: ``slots`` -> ``4``, ``count=4``."""
    settings: dict[str, tuple[str, str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        meaning = _KEYS.get(key.lower())
        if not equals:
            raise UsageError(f"unexpected word '{shown(word)}' after the host name", f"write {ACCEPTED}, one host a line")
        if meaning is None:
            raise UsageError(f"unknown setting '{shown(key)}' in '{shown(word)}'", "use slots=, max_slots=, user= and port=")
        if meaning in settings:
            raise _twice(meaning, settings[meaning][1], word)
        settings[meaning] = value, word
    return settings


def _of_list(line: _Line, hosts: str, settings: Mapping[str, tuple[str, str]]) -> Iterator[_Entry]:
    """The hosts of ``a:2,user@b`` with the settings that stand after them."""
    for item in nodelist.split(hosts):
        names, own = _item(item)
        for key in own.keys() & settings.keys():
            raise _twice(key, item, settings[key][1])
        said = {**settings, **own}
        slots, most, port = (
            _positive(key, *said[key], limit, names[0]) if key in said else None
            for key, limit in (("slots", MAX_RANKS), ("max_slots", MAX_RANKS), ("port", 65535))
        )
        user = hostnames.user(said["user"][0]) if "user" in said else ""
        if most is not None and most < (slots or 1):
            raise UsageError(f"max_slots={most} is less than slots={slots or 1}", "raise max_slots or leave it out")
        for name in names:
            yield _Entry(line, name, slots, most, user, port)


def _item(item: str) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """``user@name-or-range:slots`` -> the names, and the settings in it."""
    if not item:
        raise UsageError("empty host name between commas", "write for example node1:2,node2:2")
    user, at, rest = item.rpartition("@")
    if rest.startswith("["):
        address, closed, tail = rest[1:].partition("]")
        if not closed:
            raise UsageError(f"'[' without ']' in '{shown(item)}'", "write '[fd00::1]:4'")
        _, colon, slots = tail.partition(":")
        if tail and not tail.startswith(":"):
            raise UsageError(f"unexpected '{shown(tail)}' after the address in '{shown(item)}'", "write '[fd00::1]:4'")
        names = [hostnames.ipv6(address)]
    else:
        pattern, colon, slots = rest.partition(":")
        if ":" in slots and "[" not in rest:
            raise UsageError(f"'{shown(rest)}' looks like an IPv6 address without brackets", "write '[fd00::1]:4'")
        names = [hostnames.check(name) for name in nodelist.expand(pattern)]
    said = {"user": (user, item)} if at else {}
    return names, {**said, **({"slots": (slots, item)} if colon else {})}


def _twice(key: str, first: str, second: str) -> UsageError:
    return UsageError(f"'{key}' is given twice, '{shown(first)}' and '{shown(second)}'", f"give it once: write {ACCEPTED}")


def _positive(key: str, value: str, text: str, limit: int, name: str) -> int:
    """The number that ``text`` gives."""
    example = f"write '{name} {'slots=4 port=2222' if key == 'port' else f'{key}=4'}'"
    digits = value.lstrip("0")
    if _DIGITS.fullmatch(digits) is None:
        zero = f"; to leave {name} out, comment its line out" if value and not digits and key == "slots" else ""
        raise UsageError(f"'{key}' must be a positive integer, got '{shown(text)}'", example + zero)
    if len(digits) > len(str(limit)) or int(digits) > limit:
        raise UsageError(f"'{key}' is at most {limit}, got '{shown(text)}'", example)
    return int(digits)
