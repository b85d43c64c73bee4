"""Which variables reach the ranks: an explicit list, so that a job does not depend on whatever the shell happened to hold.

A variable is passed if its name matches ``ALLOWED`` or a pattern of the user's (``--env NAME``, ``--env 'WANDB_*'``), or if the
user gives its value. Names that no shell can hold, such as exported bash functions, are left out: launchers that go through a
remote shell break on them.
"""

from __future__ import annotations

import fnmatch
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch import Job, inputfile
from hvdtrain.world import is_identity

#: Passed without being asked for: what finds programs and libraries, and what the libraries of training read.
#: CUDA_VISIBLE_DEVICES is not here: it names this machine's devices; local ranks inherit it, other hosts have their own.
ALLOWED = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *(
        "HVDTRAIN_*",
        "HOROVOD_*",
        "NCCL_*",
        "UCX_*",
        "UCC_*",
        "FI_*",
        "GLOO_*",
        "TORCH_*",
        "PYTORCH_*",
        "TF_*",
        "XLA_*",
        "KERAS_*",
    ),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*", "CUDA_*", "NVIDIA_*", "HF_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
)

_SECRET = re.compile(
    r"TOKEN(?!I|S)|SECRET|PASSW(OR)?D|PASSPHRASE|SSHPASS|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE|AUTH|ENCRYPTION|WANDB)_?KEY"
    r"|(?:^|_)(?:PASS|PWD|JWT|PAT|COOKIE|CREDS)$",
    re.IGNORECASE,
)
#: quoted text is kept as it is; outside of it, # begins a comment at the start of a word only
_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<!\S)#[^\n]*""", re.DOTALL)
_WHY_SECRET = "looks like a secret: --env NAME passes it"
_PORTABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Selection:
    """What goes to the ranks, and the names that were left out with the reason."""

    values: Mapping[str, str]
    left_out: Mapping[str, str]


def is_secret(name: str) -> bool:
    """Whether a value under this name looks like one that must not be seen."""
    return _SECRET.search(name) is not None


def _is_ours_alone(name: str) -> bool:
    """Never passed without being named: another process's identity or this machine's devices."""
    return is_identity(name) or name.endswith("CUDA_VISIBLE_DEVICES")


def is_portable(name: str) -> bool:
    return _PORTABLE.fullmatch(name) is not None


def secrets(names: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for name in names if is_secret(name))


def of_ranks(job: Job) -> dict[str, str]:
    """The job's variables and, where the user says nothing else, the chosen interface for NCCL."""
    return {**({"NCCL_SOCKET_IFNAME": ",".join(job.nics)} if job.nics else {}), **job.env}


def select(environ: Mapping[str, str], wanted: Sequence[str] = (), given: Mapping[str, str] | None = None) -> Selection:
    """Choose from ``environ``.

    Args:
        wanted: the user's ``--env`` items: NAME, PATTERN* or NAME=VALUE.
        given: values from ``--env-file``; a later ``--env NAME=VALUE`` wins over them.

    Raises:
        UsageError: a NAME that is not set, or a secret's value on the command line.
    """
    values: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, value in environ.items():
        if not matches(name, ALLOWED) or _is_ours_alone(name):
            continue
        if is_secret(name):
            left_out[name] = _WHY_SECRET
        elif not is_portable(name):
            left_out[name] = "its name has characters that a shell cannot hold"
        else:
            values[name] = value
    values.update(given or {})
    for item in wanted:
        name, equals, value = item.partition("=")
        if not name:
            raise UsageError(f"--env '{item}' has no name", "write --env NAME, --env 'NAME*' or --env NAME=VALUE")
        if equals:
            if is_secret(name):
                raise UsageError(
                    f"--env {name}=... puts a secret on the command line, where every user of this machine can read it",
                    f"export {name} and write --env {name}, or put it into a file: --env-file FILE",
                )
            found = {name: value}
        elif any(char in name for char in "*?["):
            matching = {known: value for known, value in environ.items() if fnmatch.fnmatchcase(known, name)}
            found = {known: value for known, value in matching.items() if _may_match(known)}
            left_out |= {known: f"{_WHY_SECRET}, not a pattern" for known in matching if is_secret(known)}
        elif name in environ:
            found = {name: environ[name]}
        else:
            raise UsageError(f"--env {name}: this variable is not set here", f"export it first, or write --env {name}=VALUE")
        values.update(found)
    return Selection(values, {name: why for name, why in left_out.items() if name not in values})


def check_controller(environ: Mapping[str, str], named: Mapping[str, str], controller: str) -> list[str]:
    """What is to be told about variables that decide what Horovod coordinates over: that is said by ``--mpi`` or ``--gloo``.

    ``environ`` is the shell's, ``named`` what goes to the ranks. A rank's own shell has them from its launcher.

    Raises:
        UsageError: the user has named one for the ranks that says something else.
    """
    other = {"mpi": "--gloo", "gloo": "--mpi"}[controller]
    if named.get("HOROVOD_CONTROLLER", controller).lower() != controller:
        raise UsageError(
            f"HOROVOD_CONTROLLER={named['HOROVOD_CONTROLLER']} for the ranks contradicts --{controller}",
            f"use {other}, or leave the variable out",
        )
    hints = {"HOROVOD_CONTROLLER": f"add {other}", "HOROVOD_CPU_OPERATIONS": "--env HOROVOD_CPU_OPERATIONS passes it"}
    return [
        f"{name}={environ[name]} of this shell is not passed on, --{controller} decides ({hint})"
        for name, hint in hints.items()
        if environ.get(name, controller).lower() != controller and name not in named and "HOROVOD_RANK" not in environ
    ]


def read_file(path: str | Path) -> dict[str, str]:
    """``NAME=VALUE`` lines; quoting as in a shell (values may span lines), comments with ``#``, an optional ``export``."""
    try:
        text = _COMMENT.sub(lambda match: match[1] or "", inputfile.read(path).decode("utf-8-sig").replace("\r\n", "\n"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"--env-file '{path}' cannot be read: {why}", "write one NAME=VALUE on each line") from None
    stream = io.StringIO(text)
    reader = shlex.shlex(stream, posix=True)
    reader.whitespace_split = True
    reader.commenters = ""
    values: dict[str, str] = {}
    while True:
        try:
            word = reader.get_token()
        except ValueError:
            raise UsageError(f"{path}:{reader.lineno}: a quote is not closed", 'write NAME="a value"') from None
        if word is None:
            return values
        name, equals, value = word.partition("=")
        if word == "export":
            continue
        if not equals or not is_portable(name):
            what = f"'{name[:20]}=...'" if equals else "a word"  # which may be the rest of a secret
            line = text.count("\n", 0, max(stream.tell() - 1, 0)) + 1
            raise UsageError(f"{path}:{line}: {what} is not NAME=VALUE", 'quote values with spaces: NAME="a value"')
        if "\0" in value:
            raise UsageError(f"{path}:{reader.lineno}: the value of {name} has a NUL byte in it", "no variable can have one")
        values[name] = value


def _may_match(name: str) -> bool:
    """Whether a pattern of the user's may pass this variable: secrets and a rank's identity pass only when they are named."""
    return name != "PWD" and not is_secret(name) and not _is_ours_alone(name) and is_portable(name)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
