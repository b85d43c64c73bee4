"""What killed processes have left in /dev/shm: Python's semaphores and Open MPI's segments, which nobody else removes.

A file is taken for left when it is this user's, old enough to be in use by now, and no process of this machine has it in its memory. In a
container not all processes can be seen, so nothing is removed there. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
_NAMES = re.compile(r"sem\.mp-[a-z0-9_]{8}|vader_segment\.[\w.-]+\.\d+\.[0-9a-f]+\.\d+", re.ASCII)
#: Between the making of a file and its use.
_YOUNG_S = 60.0
#: The number that the kernel gives to the namespace of all processes (PROC_PID_INIT_INO).
_ALL_PROCESSES = 0xEFFFFFFC
_PROCESSES = Path("/proc")


def remove(folder: Path = FOLDER) -> tuple[int, int]:
    """Remove what can safely be told to be left; how many files that were, and their bytes."""
    count = size = 0
    for path in found(folder):
        with contextlib.suppress(OSError):
            taken = path.stat().st_size
            path.unlink()
            count, size = count + 1, size + taken
    return count, size


def found(folder: Path = FOLDER) -> list[Path]:
    """The files that are left there, as far as that can safely be told."""
    old = {path: inode for path, inode in _old(folder).items() if _sees_all_processes()}
    used = _used() if old else None
    return [] if used is None else [path for path, inode in old.items() if inode not in used]


def _old(folder: Path) -> dict[Path, int]:
    """The files in question, with their numbers."""
    files = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if _NAMES.fullmatch(path.name):
                about = path.lstat()
                is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
                if is_ours and time.time() - max(about.st_ctime, about.st_mtime) > _YOUNG_S:
                    files[path] = about.st_ino
    return files


def _sees_all_processes() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _ALL_PROCESSES
    except OSError:
        return False


def _used() -> set[int] | None:
    """The numbers of all files that processes have in their memory; None if one that may be this user's cannot be looked at."""
    numbers = set()
    for folder in _PROCESSES.iterdir():
        if not folder.name.isdigit() or folder.name == "1":  # init shows its memory to nobody, and trains nothing
            continue
        try:
            for line in (folder / "maps").read_bytes().splitlines():
                numbers.add(int(line.split(None, 5)[4]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            if _may_be_ours(folder):
                return None
    return numbers


def _may_be_ours(process: Path) -> bool:
    """Of one that refuses to be looked at. Who owns its folder is its effective user only; its status tells all, to everybody."""
    try:
        numbers = re.search(rb"^Uid:(.*)", (process / "status").read_bytes(), re.MULTILINE)
    except OSError:
        numbers = None
    return process.exists() if numbers is None else os.getuid() in map(int, numbers[1].split())
