"""Ask every host, before a job starts, whether it can take part: one ssh connection each, all at once.

What would otherwise be a hang or a page of a launcher's output becomes a sentence: who cannot be reached and why, where Python,
the package or the recipe is missing, which network interfaces there are.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import Host, Ssh, linux, this_host
from hvdtrain.launch.nics import Interface

CONNECT_TIMEOUT_S = 10
_ANSWER_TIMEOUT_S = 30


@dataclass(frozen=True)
class Answer:
    """What a host said about itself, or why it said nothing (``problem`` with a ``hint``)."""

    host: str
    record: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    hint: str = ""
    seconds: float = 0.0

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        return tuple(Interface.from_record(each) for each in self.record.get("nics", ()))


class HostsError(HvdtrainError):
    """Hosts cannot take part; all of them with their reasons."""


def ask(hosts: Sequence[Host], ssh: Ssh, start: Sequence[str], cwd: str, paths: Sequence[str] = ()) -> list[Answer]:
    """Ask all hosts, in parallel and in order.

    Args:
        paths: files that must be there on every host.
    """
    from concurrent.futures import ThreadPoolExecutor  # 20 ms to import, and main() on the other side does not need it

    question = [*start, "this_host", json.dumps({"cwd": cwd, "paths": list(paths), "launcher": socket.gethostname()})]
    here = this_host.own_addresses()
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        try:
            return list(pool.map(lambda host: _ask_one(host, ssh, question, cwd, this_host.is_here(host.name, here)), hosts))
        except BaseException:  # a signal: nobody waits for the answers any more, and the pool's threads wait for ssh
            linux.kill_descendants()
            raise


def _ask_one(host: Host, ssh: Ssh, question: Sequence[str], cwd: str, here: bool) -> Answer:
    argv = list(question) if here else ssh_argv(host, ssh, f"cd {shlex.quote(cwd)} 2>/dev/null; exec {shlex.join(question)}")
    started = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Answer(host.name, problem=f"there is no program '{argv[0]}' on this machine", hint="install openssh-client")
    except subprocess.TimeoutExpired:
        return Answer(
            host.name,
            problem=f"connected, but gave no answer within {_ANSWER_TIMEOUT_S} s",
            hint="is the host overloaded, or its file system stuck?",
        )
    target = replace(host, port=ssh.port if ssh.port is not None else host.port)
    return read(target, done.returncode, done.stdout, done.stderr, seconds=time.monotonic() - started)


def ssh_argv(host: Host, ssh: Ssh, command: str) -> list[str]:
    """Never asks for anything, and checks host keys as the user's ssh configuration says. Of two words on a matter ssh takes
    the first, so the user's own options come before ours.

    It may use a master connection of the user's, and never becomes one: that would hold our pipes open when it is done.
    """
    ours = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ControlMaster=no"]
    port = ["-p", str(host.port)] if host.port is not None and ssh.port is None else []
    return ["ssh", *ssh.argv(), *port, *ours, host.login, command]


#: ssh's message -> what it means, and what to do; ``{option}`` is ``-p PORT`` if there is a port. The first that fits counts.
_SSH_PROBLEMS: Sequence[tuple[str, str, str]] = (
    (
        r"Could not resolve hostname|Name or service not known",
        "unknown host: the name does not resolve",
        "check the name, or add HostName to ~/.ssh/config",
    ),
    (r"Connection refused", "nothing listens on {port}", "is sshd running there, and on this port? see --ssh-port"),
    (r"timed out|No route to host|Network is unreachable", "no answer on {port}", "is the host up, and is a firewall between?"),
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED",
        "its host key is not known, or has changed",
        "compare the key, then: ssh-keyscan {option}{host} >> ~/.ssh/known_hosts",
    ),
    (
        r"Permission denied",
        "it does not accept our key",
        "ssh-copy-id {option}{login}, or name the key: --ssh-identity-file FILE",
    ),
    (
        r"Connection (?:reset|closed) by|kex_exchange_identification",
        "it accepted the connection on {port} and closed it",
        "does sshd run with -d (one connection only), or is MaxStartups reached?",
    ),
)


def read(target: Host, code: int, out: str, err: str, *, seconds: float = 0.0) -> Answer:
    """What ssh printed and returned -> the answer. ``target`` has the port that was used. Pure."""
    host, option = target.name, f"-p {target.port} " if target.port is not None else ""
    _, mark, text = out.partition(this_host.MARK)
    if mark:
        try:
            return Answer(host, json.loads(text.partition("\n")[0]), seconds=seconds)
        except ValueError:
            pass
    said = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "") or f"exit code {code}"
    if code == 255:
        where = f"port {target.port or 22}"
        for pattern, problem, hint in _SSH_PROBLEMS:
            if re.search(pattern, err):
                hint = hint.format(host=host, login=target.login, option=option)
                return Answer(host, problem=problem.format(port=where), hint=hint, seconds=seconds)
        return Answer(host, problem=f"ssh failed: {said}", hint=f"try: ssh {option}{target.login} true", seconds=seconds)
    if "can't open file" in err or "No module named" in err:
        problem = f"hvdtrain is not installed there at the path it has here ({said})"
        return Answer(
            host, problem=problem, hint="install it at the same path on every host, or share the folder", seconds=seconds
        )
    if code in (126, 127):
        problem = f"Python is not there at the path it has here ({said})"
        return Answer(
            host, problem=problem, hint="make the environment at the same path on every host, or share it", seconds=seconds
        )
    return Answer(
        host,
        problem=f"the check failed there: {said}",
        hint=f"try: ssh {option}{target.login} {shlex.quote(sys.executable)} --version",
        seconds=seconds,
    )


def problems(answers: Sequence[Answer], cwd: str) -> list[Answer]:
    """Hosts that cannot take part, each with its first problem: unreachable, or without what the job needs. Pure."""
    bad = []
    for answer in answers:
        record = answer.record
        missing = [path for path, digest in record.get("paths", {}).items() if not digest]
        if answer.problem:
            bad.append(answer)
        elif not record.get("cwd"):
            bad.append(
                Answer(answer.host, problem=f"the folder {cwd} is not there", hint="make it, or share it between the hosts")
            )
        elif missing:
            problem = f"{', '.join(missing)} is not there (in {cwd})"
            bad.append(Answer(answer.host, problem=problem, hint="copy it to every host, or share the folder"))
    return bad


def differences(answers: Sequence[Answer]) -> list[str]:
    """Sentences about what differs between hosts and should not: Python, the package, the recipe. Pure."""
    found = []
    told = [answer for answer in answers if answer.record]
    for key, what in (("python", "Python"), ("package", "hvdtrain"), ("paths", "the recipe")):
        values: dict[str, list[str]] = {}
        for answer in told:
            value = answer.record.get(key)
            values.setdefault(value if isinstance(value, str) else json.dumps(value, sort_keys=True), []).append(answer.host)
        if len(values) > 1:
            groups = sorted(values.items(), key=lambda item: -len(item[1]))
            odd = ", ".join(f"{', '.join(hosts[:8])}{f' ({value})' if key == 'python' else ''}" for value, hosts in groups[1:])
            most = groups[0]
            found.append(f"{what} differs on {odd} from that on {most[1][0]}{f' ({most[0]})' if key == 'python' else ''}")
    deaf = [answer.host for answer in told if not answer.record.get("launcher_resolves", True)]
    if deaf:
        found.append(
            f"{', '.join(deaf[:8])} cannot resolve this machine's name ({socket.gethostname()}): daemons may not call back"
        )
    return found


def error(bad: Sequence[Answer], asked: int) -> HostsError:
    """One error for all hosts that cannot take part."""
    lines = [f"{answer.host}: {answer.problem}" for answer in bad[:20]]
    lines += [f"... and {len(bad) - 20} more hosts"] if len(bad) > 20 else []
    hints = list(dict.fromkeys(answer.hint for answer in bad if answer.hint))
    return HostsError(f"{len(bad)} of {asked} hosts cannot take part\n" + "\n".join(lines), "; ".join(hints[:3]))


def second(first: Sequence[Answer], again: Sequence[Answer]) -> list[Answer]:
    """Hosts that answered once and not twice. Launchers connect more than once, and some servers take one connection. Pure."""
    return [
        Answer(
            after.host,
            problem=f"the first connection worked, the second did not: {after.problem}",
            hint="does sshd run with -d?",
        )
        for before, after in zip(first, again, strict=True)
        if not before.problem and after.problem
    ]
