"""Between a launcher and a rank, on the rank's host: whole lines out, the right threads and GPUs in, and nothing left behind.

``launcher -> keeper -> relay -> rank``. The relay starts the rank in a session of its own, sends its output on as frames, tells
how it ended, and ends it with all its descendants when the launcher asks for it, is killed, or stops reading. It does not hold
up anything: a rank without a launcher in sight is not worth keeping.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import Any

from hvdtrain.launch import GRACE_S, Job, failures, frames, keeper, linux, nodelist, resources
from hvdtrain.launch.lines import Lines
from hvdtrain.launch.placement import DeviceError, as_started, environment_for, host_name, place_of, rank_of

#: How long output may still come after the rank is gone.
_DRAIN_S = 1.0
#: Signals that come together are one.
_ONE_S = 0.3
#: How often it is looked at.
_LOOK_MS = 1000
#: What TensorFlow says of itself on stderr: no reason for anything.
_CHATTER = re.compile(r"[IW]\d{4} \d\d:|WARNING: All log messages before absl|To enable the following instructions")
#: What is kept of the rank's last lines on stderr, and of each.
_TAIL_LINES, _TAIL_CHARS = 20, 2000
#: How words begin that a launcher may take for its own, and the mark that keeps it from that.
_TAKEN = ("-", ":", "@", "=")


def wrap(job: Job, *, start: Sequence[str], share_devices: bool = False) -> Job:
    """The job with a relay around every rank. ``start``: how to start our small programs on every host (``launch.start_argv``)."""
    devices = [list(host.devices) for host in job.hosts]
    argv = [*start, "relay", "--slots", nodelist.compress_tasks([host.slots for host in job.hosts])]
    argv += ["--devices", ";".join(",".join(map(str, each)) for each in devices)] if any(devices) else []
    argv += ["--grace", str(job.grace_s)] if job.grace_s != GRACE_S else []
    argv += ["--share-devices"] if share_devices else []
    argv += ["--stops"] if job.stop_s else []
    # Horovod's launcher goes on, in another folder, where it cannot enter the job's.
    argv += ["--chdir", job.cwd] if job.cwd and job.controller == "gloo" else []
    return replace(job, argv=(*argv, "--", *map(guarded, job.argv)), tagged=True)


def guarded(word: str) -> str:
    """A word of the program as it stands in a launcher's command: launchers look for options, also behind the program's name."""
    return f"={word}" if word.startswith(_TAKEN) else word


def unguarded(word: str) -> str:
    return word.removeprefix("=")


class Wire:
    """What the launcher reads: frames on our stdout. ``lost`` once nobody reads any more.

    ``paced``: whoever reads them mixes what it reads of several ranks at any byte. So each block of frames is written whole, and
    only when the one before has been read: what is read at once is then whole frames. (Intel MPI; MPICH has the same root.)
    """

    def __init__(self, rank: int, host: str, *, paced: bool = False) -> None:
        self._rank, self._host, self._paced = rank, host, paced
        self._watched = select.poll()
        self._watched.register(1, 0)
        self.lost = False

    def lines(self, kind: frames.Kind, lines: Iterable[tuple[str, bool]]) -> None:
        """Text, and whether it is progress."""
        each = (frames.encode(self._rank, self._host, kind, text, progress=progress) for text, progress in lines)
        self._write(chain.from_iterable(each))

    def started(self) -> None:
        self._write(frames.encode(self._rank, self._host, "s", ""))

    def report(self, info: Mapping[str, Any]) -> None:
        self._write(frames.encode_report(self._rank, self._host, info))

    def ended(self, code: int, words: Mapping[str, Any], *, told: int = 0) -> None:
        info = {"time": time.time(), **words, "code": code, "told": told}
        self._write(frames.encode_ended(self._rank, self._host, info))

    def _write(self, parts: Iterable[bytes]) -> None:
        for block in frames.blocks(parts):
            if self._paced:
                self._drain()
            while block and not self.lost:
                try:
                    block = block[os.write(1, block) :]
                except BlockingIOError:
                    select.select([], [1], [], 1.0)
                except OSError:
                    self.lost = True

    def _drain(self) -> None:
        """Until what was written before has been read."""
        pause_s = 1e-5
        while not self.lost and linux.unread(1):
            self.lost = bool(self._watched.poll(0))  # only errors: there is no reader any more
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)


class Relay:
    """Runs one rank."""

    def __init__(self, wire: Wire, grace_s: float, *, stops: bool = False) -> None:
        self._wire, self._grace_s, self._stops = wire, grace_s, stops
        self._early: list[int] = []
        self._keeper = os.getpid()  # made by the keeper, before it starts the process in which ``run`` is called
        self._was_left = False  # whether the keeper was killed, and that is why the rank ends
        self._child: subprocess.Popen[bytes] | None = None
        self._told, self._told_at = 0, 0.0  # the signal by which we were asked to end the rank, and when
        self._tail: list[str] = []
        self._said = ""  # the exception that the rank had told of by then
        self._words: dict[str, Any] = {}
        self._is_suspended = False
        self._oom_before = linux.oom_kills()

    def run(self, argv: Sequence[str], environ: Mapping[str, str], ready: Callable[[], None]) -> int:
        """Start, forward, wait; the rank's exit code (128 + n for signal n)."""
        linux.adopt_orphans()
        for number in keeper.ENDING:
            signal.signal(number, self._end)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGCONT, self._go_on)
        signal.signal(signal.SIGALRM, self._kill)
        ready()
        self._wire.started()
        try:
            self._child = subprocess.Popen(
                argv,
                env={**environ, frames.WORDS_WANTED: "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                close_fds=False,  # PMI talks through a descriptor that the launcher opened
                preexec_fn=linux.dies_with_us(signal.SIGKILL, *((linux.holds(signal.SIGUSR1),) if self._stops else ())),
            )
        except OSError as error:
            return self._failed_to_start(argv, error)
        for early in self._early:  # they came while we were starting it
            self._child.send_signal(early)
        if self._told:
            self._end(self._told, None)
        self._forward()
        code = self._child.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        linux.kill_descendants()
        code = 128 - code if code < 0 else code
        said_at = self._words.get("time")
        # A rank that had said why it fails was not ended by us, even if it was still there when we were told to end it.
        before = isinstance(said_at, int | float) and said_at < self._told_at
        before = before or self._words.get("stopped") is True  # nor was one that stopped in order, though it was told to
        words: dict[str, Any]
        if self._was_left and not before:
            code = 128 + signal.SIGKILL
            words = {"error": f"its relay was {failures.describe_signal(signal.SIGKILL)}", "follows": True}
        else:
            words = (self._words or failures.words_for(code, self._tail, oom_kills=self._oom_kills())) if code else {}
        self._wire.ended(code, {**words, "said": self._said}, told=0 if before or self._was_left else self._told)
        return code

    def _oom_kills(self) -> int | None:
        now = linux.oom_kills()
        return None if now is None or self._oom_before is None else now - self._oom_before

    def _failed_to_start(self, argv: Sequence[str], error: OSError) -> int:
        code = 126 if isinstance(error, PermissionError) else 127
        is_script = argv[0].endswith(".py") and os.path.isfile(argv[0])
        hint = f"a script needs its interpreter: -- python {shlex.join(argv[:1])}" if is_script else ""
        words = {"phase": "launch", "error": f"cannot start {argv[0]}: {error.strerror} (in {os.getcwd()})", "hint": hint}
        self._wire.ended(code, words)
        return code

    # --- output

    def _forward(self) -> None:
        """Until the rank is gone and has nothing more to say, or nobody listens."""
        assert self._child is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        pipes: dict[int, tuple[frames.Kind, Lines]] = {
            self._child.stdout.fileno(): ("o", Lines()),
            self._child.stderr.fileno(): ("e", Lines()),
        }
        streams = list(pipes.values())
        poll = select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        poll.register(1, 0)  # only errors: the launcher is gone when nobody can read what we write
        exited = os.pidfd_open(self._child.pid)
        poll.register(exited, select.POLLIN)
        gone_at = 0.0
        while pipes:
            events = poll.poll(50 if gone_at else _LOOK_MS)
            if not events:
                self._look()
            for pipe, _ in events:
                if pipe == 1:
                    self._wire.lost = True
                    poll.unregister(1)
                elif pipe == exited:
                    gone_at = time.monotonic()
                    poll.unregister(exited)
                elif data := os.read(pipe, 65536):
                    kind, lines = pipes[pipe]
                    self._send(kind, lines.feed(data))
                else:
                    poll.unregister(pipe)
                    del pipes[pipe]
            if self._wire.lost and not self._told:
                self._end(signal.SIGHUP, None)
            if gone_at and (not events or time.monotonic() - gone_at > _DRAIN_S):
                break  # a descendant holds the pipe open; it is about to be ended
        os.close(exited)
        for kind, lines in streams:
            self._send(kind, lines.close())

    def _send(self, kind: frames.Kind, lines: Iterable[tuple[str, bool]]) -> None:
        self._wire.lines(kind, self._without_words(kind, lines))

    def _without_words(self, kind: frames.Kind, lines: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """The lines that are to be shown."""
        for line, progress in lines:
            text, words = frames.split_words(line)
            if words is not None:
                if words.get(frames.RUNNING):
                    self._wire.report(words)
                else:
                    self._words = words
                if not text:
                    continue
            if kind == "e" and text.strip() and not progress and not _CHATTER.match(text):
                self._tail = [*self._tail[-_TAIL_LINES + 1 :], text[:_TAIL_CHARS]]
            yield text, progress

    def _look(self) -> None:
        """Tell when somebody has stopped the rank (SIGSTOP), or lets it go on: it cannot do so itself."""
        assert self._child is not None
        suspended = linux.is_stopped(self._child.pid)
        if suspended != self._is_suspended and not self._told:  # we continue it ourselves to end it
            self._is_suspended = suspended
            self._wire.report({"suspended": suspended})

    # --- the end

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Politely the first time, by force the second. What Slurm sends to each process of a step comes again from the keeper."""
        if self._told and frame is not None:
            if time.time() - self._told_at > _ONE_S:
                self._kill(number, frame)
            return
        self._told, self._told_at = number, time.time()
        self._said = failures.exception_in(self._tail)
        if self._child is not None:
            linux.signal_group(self._child.pid, signal.SIGTERM)
            linux.signal_group(self._child.pid, signal.SIGCONT)  # a stopped process cannot end politely
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None:
            linux.signal_group(self._child.pid, signal.SIGKILL)
            linux.kill_descendants(keep=self._child.pid)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """To the rank alone: what it has started (loaders) may die of it."""
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        """SIGCONT: somebody lets the rank go on; or the keeper is gone."""
        if os.getppid() != self._keeper:
            self._was_left = self._was_left or not self._told
            self._end(signal.SIGTERM, frame)
        elif self._child is not None:
            linux.signal_group(self._child.pid, number)


def main(argv: Sequence[str]) -> int:
    """``start.py relay --slots 4(x3),2 [...] -- PROGRAM ARGS``."""
    linux.die_with_parent(signal.SIGTERM)
    at = list(argv).index("--")
    parser = argparse.ArgumentParser(prog="start.py relay")
    parser.add_argument("--slots", required=True)
    parser.add_argument("--devices", default="")
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--share-devices", action="store_true")
    parser.add_argument("--stops", action="store_true", help="the rank waits for SIGUSR1, when it is ready")
    parser.add_argument("--chdir", default="")
    args = parser.parse_args(argv[:at])
    place = as_started(place_of(rank_of(os.environ), nodelist.tasks_per_node(args.slots)), os.environ)
    cpus = resources.usable_cpus(resources.affinity())
    wire = Wire(place.rank, host_name(os.environ), paced="PMI_RANK" in os.environ)
    try:
        extra = _enter(args.chdir)
        extra |= environment_for(place, os.environ, cpus, args.devices, share=args.share_devices)
    except (DeviceError, OSError) as error:
        wire.started()
        if isinstance(error, OSError):
            text, hint = f"cannot enter the folder {args.chdir}: {error.strerror}", "make it, or share it between the hosts"
        else:
            text, hint = str(error), "lower the host's slots, or add --share-devices"
        wire.ended(2, {"phase": "launch", "error": text, "hint": hint})
        return 2

    def lost(number: int, told: int) -> None:
        wire.ended(128 + number, {"error": f"its relay was {failures.describe_signal(number)}"}, told=told)

    relay = Relay(wire, args.grace, stops=args.stops)
    program = [unguarded(word) for word in argv[at + 1 :]]
    return keeper.keep(lambda ready: relay.run(program, {**os.environ, **extra}, ready), lost, grace_s=args.grace)


def _enter(folder: str) -> dict[str, str]:
    """Go there, and what the rank's environment has to say about it."""
    if not folder:
        return {}
    os.chdir(folder)
    return {"PWD": folder}
