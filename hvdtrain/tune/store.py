"""What was found, as a file for each (recipe, settings, hosts, versions): $XDG_CACHE_HOME/hvdtrain/tuned/KEY.json."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain.config import Config
from hvdtrain.errors import HvdtrainError, shown
from hvdtrain.horovod.cache import cache_folder, cache_key
from hvdtrain.launch import Controller, Host, detect, is_here, resources
from hvdtrain.tune import space
from hvdtrain.tune.search import Settings

#: Raised when a field changes its meaning: files of before are then as good as not there.
FORMAT = 1

_PACKAGES = ("hvdtrain", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py")
#: The options of ``hvdtrain train`` that a step's time hangs on. Those that are searched count where the user has set them.
_OPTIONS = (
    *("batch_size", "batch_size_per_rank", "share", "loader_workers", "prefetch", "compression_warmup"),
    *space.OPTIONS.values(),
)


@dataclass(frozen=True)
class Tuned:
    """What is used for one key.

    Attributes:
        settings: what differs from the defaults; empty: they are the fastest.
        date: when that was found, as people read it.
        ratio: of the step's time, over the defaults'; 1 where they are the fastest.
    """

    settings: Settings
    date: str
    ratio: float = 1.0

    @property
    def reason(self) -> str:
        return f"tuned: {self.ratio:.2f} of the defaults' step time ({self.date})"


@dataclass(frozen=True)
class Key:
    """What the result hangs on."""

    parts: Mapping[str, Any]

    def path(self, environ: Mapping[str, str] = os.environ) -> Path:
        return cache_folder(environ).with_name("tuned") / f"{cache_key(self.parts)}.json"


class DamagedError(HvdtrainError):
    """A file that is there and cannot be used."""


def key(config: Config, hosts: Sequence[Host], controller: Controller, mpi: str) -> Key:
    """Of a job that trains ``config`` on ``hosts``, each with as many ranks as it has slots; ``mpi`` is the launcher's."""
    place, _, function = config.recipe.partition(":")
    set_by_user = space.given(config.origins)
    return Key(
        {
            "recipe": _text(place),
            "function": function or "recipe",
            "settings": {name: str(value) for name, value in config.settings.items()},
            "options": {name: str(getattr(config.options, name)) for name in _OPTIONS if name in set_by_user},
            "hosts": [[_name(host), host.slots] for host in hosts],
            "cpus": resources.usable_cpus(resources.affinity()),
            "controller": controller,
            "mpi": mpi,
            "versions": _versions(),
        }
    )


def read(path: Path) -> Tuned | None:
    """What is stored there; None if nothing is.

    Raises:
        DamagedError: what is there is not what ``write`` writes.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["hvdtrain_tuned"] != FORMAT:
            return None
        settings = tuple((str(name), str(value)) for name, value in values["settings"])
        for name, value in settings:
            if not space.is_value(name, value):
                raise ValueError(f"there is no {shown(f'{name}={value}')!r} to set")
        date, ratio = str(values["date"]), float(values["ratio"])
        if not date.isprintable():
            raise ValueError(f"{shown(date)!r} is no date")
        if not 0 < ratio <= 1:
            raise ValueError(f"{ratio} is no part of the defaults' step time")
        return Tuned(settings, date, ratio)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(
            f"the tuned settings in {path} cannot be read: {error.strerror}", "hvdtrain tune writes them anew"
        ) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DamagedError(f"{path} is damaged ({why}): the defaults are used", "hvdtrain tune writes it anew") from None


def write(path: Path, tuned: Tuned, more: Mapping[str, Any]) -> None:
    """Store, whole or not at all. ``more`` is for people who look into the file."""
    with _folder(path) as folder:
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"hvdtrain_tuned": FORMAT, **asdict(tuned), **more}, file, indent=1)
                file.write("\n")
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


def check(path: Path) -> None:
    """Raises HvdtrainError where ``write`` would: before something is measured that could not be stored."""
    with _folder(path) as folder, tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder of ``path``, made if need be; what the system refuses meanwhile is told as ours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path.parent
    except OSError as error:
        message = f"the result cannot be stored in {path}: {error.strerror}"
        raise HvdtrainError(message, "set XDG_CACHE_HOME to a folder that you may write to") from None


def _name(host: Host) -> str:
    """A machine of one's own has a name that tells it from others which share the home directory."""
    return os.uname().nodename.lower() if is_here(host.name, detect.own_names()) else host.name.lower()


def _text(place: str) -> str:
    """The text of a recipe's file; of a module, where Python would find it without importing its package."""
    module = place.replace(".", os.sep)
    paths = [
        Path(place),
        *(Path(folder, name) for folder in ("", *sys.path) for name in (f"{module}.py", f"{module}/__init__.py")),
    ]
    for path in paths:
        with suppress(OSError, ValueError):
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
