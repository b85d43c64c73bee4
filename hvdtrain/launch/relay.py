"""Between a launcher and a rank, on the rank's host: whole lines out, the right threads and GPUs in, and nothing left behind.

``launcher -> relay -> rank``. The relay starts the rank in a session of its own, sends its output on as frames, tells how it
ended, and ends it with all its descendants when the launcher asks for it, is killed, or stops reading. It does not hold up
anything: a rank without a launcher in sight is not worth keeping.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.launch import GRACE_S, Job, frames, nodelist, resources
from hvdtrain.launch.placement import DeviceError, Place, as_started, environment_for, host_name, place_of, rank_of

#: How long output may still come after the rank is gone.
_DRAIN_S = 1.0
_TAIL_LINES = 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def wrap(job: Job, *, start: Sequence[str], errors: str = "", share_devices: bool = False) -> Job:
    """The job with a relay around every rank.

    Args:
        start: how to start our small programs on every host (``launch.start_argv``).
        errors: where ranks leave their last words, if they do.
    """
    devices = [list(host.devices) for host in job.hosts]
    argv = [*start, "relay", "--slots", nodelist.compress_tasks([host.slots for host in job.hosts])]
    argv += ["--errors", errors] if errors else []
    argv += ["--devices", ";".join(",".join(map(str, each)) for each in devices)] if any(devices) else []
    argv += ["--grace", str(job.grace_s)] if job.grace_s != GRACE_S else []
    argv += ["--share-devices"] if share_devices else []
    return replace(job, argv=(*argv, "--", *job.argv), tagged=True)


class Relay:
    """Runs one rank."""

    def __init__(self, place: Place, host: str, errors: str, grace_s: float) -> None:
        self._place, self._host, self._errors, self._grace_s = place, host, errors, grace_s
        self._child: subprocess.Popen[bytes] | None = None
        self._told = 0  # the signal by which the launcher asked us to end
        self._tail: list[str] = []
        self._partial = {"o": b"", "e": b""}
        self._reader_gone = False

    def run(self, argv: Sequence[str], environ: Mapping[str, str], cpus: int) -> int:
        """Start, forward, wait; the rank's exit code (128 + n for signal n)."""
        _forget(self._error_file)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGALRM, self._kill)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            signal.signal(number, self._pass_on)
        self._send_json("s", {"pid": os.getpid(), "cpus": cpus, "time": time.time()})
        try:
            self._child = subprocess.Popen(
                argv,
                env=dict(environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                close_fds=False,  # PMI talks through a descriptor that the launcher opened
                preexec_fn=_child_dies_with_us,
            )
        except OSError as error:
            return self._failed_to_start(argv, error)
        if self._told:  # the signal came while we were starting it
            self._end(self._told, None)
        self._forward()
        code = self._child.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _kill_descendants()
        code = 128 - code if code < 0 else code
        self._send_json("x", {"code": code, "told": self._told, "time": time.time(), **self._last_words(code)})
        return code

    def refuse(self, error: str, hint: str) -> int:
        """Say why the rank is not started."""
        self._send_json("s", {"pid": os.getpid(), "time": time.time()})
        self._send_json("x", {"code": 2, "told": 0, "time": time.time(), "phase": "launch", "error": error, "hint": hint})
        return 2

    def _failed_to_start(self, argv: Sequence[str], error: OSError) -> int:
        code = 126 if isinstance(error, PermissionError) else 127
        where = f"cannot start {argv[0]}: {error.strerror} (in {os.getcwd()})"
        self._send_json("x", {"code": code, "told": 0, "time": time.time(), "phase": "launch", "error": where})
        return code

    # --- output

    def _forward(self) -> None:
        """Until the rank is gone and has nothing more to say, or nobody listens."""
        assert self._child is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        pipes = {self._child.stdout.fileno(): "o", self._child.stderr.fileno(): "e"}
        poll = select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        poll.register(1, 0)  # only errors: the launcher is gone when nobody can read what we write
        exited = os.pidfd_open(self._child.pid)
        poll.register(exited, select.POLLIN)
        gone_at = 0.0
        while pipes:
            events = poll.poll(50 if gone_at else None)
            for pipe, event in events:
                if pipe == 1:
                    self._reader_lost()
                    poll.unregister(1)
                elif pipe == exited:
                    gone_at = time.monotonic()
                    poll.unregister(exited)
                elif not self._read(pipe, pipes[pipe], event):
                    poll.unregister(pipe)
                    del pipes[pipe]
            if gone_at and (not events or time.monotonic() - gone_at > _DRAIN_S):
                break  # a descendant holds the pipe open; it is about to be ended
        os.close(exited)
        for kind, rest in self._partial.items():
            if rest:
                self._send(kind, rest)

    def _read(self, pipe: int, kind: str, event: int) -> bool:
        data = os.read(pipe, 65536) if event & (select.POLLIN | select.POLLHUP) else b""
        if not data:
            return False
        pending = self._partial[kind] + data
        start = 0
        for at in _line_ends(pending):
            carriage = pending[at : at + 1] == b"\r" and pending[at + 1 : at + 2] != b"\n"
            self._send(kind, pending[start:at], progress=carriage)
            start = at + (2 if pending[at : at + 2] == b"\r\n" else 1)
        self._partial[kind] = pending[start:]
        return True

    def _send(self, kind: str, line: bytes, *, progress: bool = False) -> None:
        text = line.decode("utf-8", "backslashreplace")
        if kind == "e" and text.strip() and not progress:
            self._tail = [*self._tail[-_TAIL_LINES + 1 :], text]
        self._write(frames.encode(self._place.rank, self._host, "o" if kind == "o" else "e", text, progress=progress))

    def _send_json(self, kind: frames.Kind, info: Mapping[str, Any]) -> None:
        self._write(frames.encode_json(self._place.rank, self._host, kind, info))

    def _write(self, parts: Any) -> None:
        for part in parts:
            while part and not self._reader_gone:
                try:
                    part = part[os.write(1, part) :]
                except BlockingIOError:
                    select.select([], [1], [], 1.0)
                except OSError:
                    self._reader_lost()

    # --- the end

    @property
    def _error_file(self) -> Path | None:
        return Path(self._errors) / f"rank-{self._place.rank}.json" if self._errors else None

    def _last_words(self, code: int) -> dict[str, Any]:
        """What the rank wrote before it died, else what can be said about its end."""
        if code == 0:
            return {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            if self._error_file is not None:
                return dict(json.loads(self._error_file.read_text(encoding="utf-8")))
        tail = "\n".join(self._tail)
        if code > 128:
            return {"error": describe_signal(code - 128), "traceback": tail}
        last = cause(self._tail)
        return {"error": f"exit code {code}" + (f": {last}" if last else ""), "traceback": tail if len(self._tail) > 1 else ""}

    def _reader_lost(self) -> None:
        if not self._reader_gone:
            self._reader_gone = True
            self._end(signal.SIGHUP, None)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._child is None:
            self._told = number
            return
        if self._told and frame is not None:
            self._kill(number, frame)
            return
        self._told = number
        _signal_group(self._child.pid, signal.SIGTERM)
        _signal_group(self._child.pid, signal.SIGCONT)  # a stopped process cannot end politely
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None:
            _signal_group(self._child.pid, signal.SIGKILL)
            _kill_descendants(keep=self._child.pid)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None:
            _signal_group(self._child.pid, number)


def cause(lines: Sequence[str]) -> str:
    """The line that says why: the last one that names an exception, else the last one."""
    named = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b", line)]
    return (named or [line for line in lines if line.strip()] or [""])[-1].strip()


def describe_signal(number: int) -> str:
    """What a death by this signal usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    why: dict[int, str] = {
        signal.SIGKILL: ": the out-of-memory killer, or somebody's kill",
        signal.SIGSEGV: ": a crash in compiled code",
        signal.SIGBUS: ": a crash in compiled code, or /dev/shm is full",
        signal.SIGABRT: ": a library gave up, see its message above",
    }
    return f"killed by signal {number} ({name}){why.get(number, '')}"


def _line_ends(data: bytes) -> list[int]:
    r"""Where lines end: at \n, \r\n, or a \r that is not the last byte (the \n may still come)."""
    ends: list[int] = []
    at = 0
    while True:
        newline, carriage = data.find(b"\n", at), data.find(b"\r", at)
        if carriage != -1 and (newline == -1 or carriage < newline):
            if carriage == len(data) - 1:
                return ends
            ends.append(carriage)
            at = carriage + (2 if data[carriage + 1 : carriage + 2] == b"\n" else 1)
        elif newline != -1:
            ends.append(newline)
            at = newline + 1
        else:
            return ends


def _forget(path: Path | None) -> None:
    """Last words of an earlier run in the same directory are not this run's."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _libc() -> Callable[..., int]:
    prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    return prctl


def _prctl(option: int, value: int) -> None:
    _libc()(option, value, 0, 0, 0)


_LIBC = _libc()
_PARENT = os.getpid()


def _child_dies_with_us() -> None:
    _LIBC(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_descendants(keep: int = 0) -> None:
    """End what is left below us, also what left its session: as their subreaper we inherit it."""
    for _ in range(50):
        below = _descendants(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            if pid != keep:  # the rank itself is waited for elsewhere, where its exit code is wanted
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    """Live ones; the direct child that Popen is still to wait for counts too."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop()
        try:
            children = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        except OSError:
            children = []
        found += [child for child in children if _state(child) not in "ZX"]
        queue += children
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def main(argv: Sequence[str]) -> int:
    """``start.py relay --slots 4(x3),2 [...] -- PROGRAM ARGS``."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    at = list(argv).index("--")
    parser = argparse.ArgumentParser(prog="start.py relay")
    parser.add_argument("--slots", required=True)
    parser.add_argument("--errors", default="")
    parser.add_argument("--devices", default="")
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--share-devices", action="store_true")
    args = parser.parse_args(argv[:at])
    place = as_started(place_of(rank_of(os.environ), nodelist.tasks_per_node(args.slots)), os.environ)
    cpus = resources.usable_cpus(resources.affinity())
    relay = Relay(place, host_name(os.environ), args.errors, args.grace)
    try:
        extra = environment_for(place, os.environ, cpus, args.devices, share=args.share_devices)
    except DeviceError as error:
        return relay.refuse(str(error), "lower the host's slots, or add --share-devices")
    return relay.run(argv[at + 1 :], {**os.environ, **extra}, cpus)
