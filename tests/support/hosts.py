"""Several emulated hosts on this machine (``tests/cluster/cluster``), for tests that need real ssh, real networks, real faults."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "cluster" / "cluster"
STATE = Path("/run/cluster")
NEEDS = ("ip", "tc", "unshare", "nsenter", "setpriv", "sshd", "ssh", "ssh-keygen")
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str:
    """Why hosts cannot be emulated here, or an empty string."""
    if os.geteuid():
        return "emulating hosts needs root"
    missing = [program for program in NEEDS if shutil.which(program, path=_PATH) is None]
    return f"emulating hosts needs {' '.join(missing)} (apt-get install iproute2 util-linux openssh-server)" if missing else ""


class Cluster:
    """Hosts node1 .. nodeN."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, *words: str) -> str:
        done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"cluster {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def fresh(self) -> None:
        """The hosts as after a first start, whatever happened to them."""
        self("down")
        self("up", str(self.size))

    def argv(self, node: str, *command: str | Path) -> list[str]:
        return [sys.executable, str(SCRIPT), "exec", node, "--", *map(str, command)]

    def popen(self, node: str, *command: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start a command on a host; stdout and stderr come in one stream."""
        return subprocess.Popen(
            self.argv(node, *command), cwd=cwd, env={**os.environ, "PATH": _PATH}, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, node: str, *command: str | Path, cwd: Path, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(node, *command), cwd=cwd, env={**os.environ, "PATH": _PATH}, text=True, errors="replace",
            stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False,
        )  # fmt: skip

    def processes(self, node: str) -> dict[int, str]:
        """What runs on a host beside its own init and ssh server: pid (as seen from outside) -> command line."""
        name = f"net:[{os.stat(f'/run/netns/{node}').st_ino}]"
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    os.readlink(folder / "ns" / "net") != name
                    or (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                ):
                    continue
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if not (
                line.startswith(("sshd:", "/usr/sbin/sshd"))
                or "cluster _init" in line
                or "nsenter " in line
                or "unshare " in line
            ):
                found[int(folder.name)] = line
        return found

    def left(self, within_s: float = 15.0) -> list[str]:
        """Processes that are still on any host after this time: orphans. Returns as soon as there are none."""
        deadline = time.monotonic() + within_s
        while True:
            left = [f"{node}: {line}" for node in self.nodes() for line in self.processes(node).values()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.size + 1)]


@contextmanager
def emulated(size: int) -> Iterator[Cluster]:
    """Hosts while this is open; one user at a time. Skips the test where they cannot be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with open("/run/lock/hvdtrain-cluster", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(size)
        cluster.fresh()
        try:
            yield cluster
        finally:
            cluster("down")
