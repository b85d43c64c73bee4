"""One process too many, so that nothing is left behind when one is killed. Standard library only; used on every host.

``keeper -> worker -> what it starts``. If the worker is killed, even by SIGKILL, its descendants become the keeper's, which ends
them. If the keeper is killed, the kernel tells the worker, which ends its descendants, too. The worker is in a session of its own,
so that a signal to the keeper's process group does not reach both.
"""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable

from hvdtrain.launch import linux

#: What asks for an end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: What is handed on; SIGCONT also tells the worker that we are gone.
OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_TAKEN = frozenset({*ENDING, *OTHERS, signal.SIGCHLD})


#: What a worker needs beyond the time that its ranks are given, once it was asked for an end; then it is killed.
_WORKERS_OWN_S = 3.0
#: How long the last words about a worker that was killed may take: nobody may be there to read them.
_WORDS_S = 3


def keep(work: Callable[[Callable[[], None]], int], lost: Callable[[int, int], None], *, grace_s: float) -> int:
    """Run ``work`` in a process of its own, hand on the signals that we get, and return its exit code (128 + n for signal n).

    A worker that is stopped (SIGSTOP) goes on when it is asked for an end, and one that does not end is killed.

    Args:
        work: is given a function to call when it is ready for signals; until then they wait. It gets SIGCONT when we are gone:
            the one signal that a stopped process takes, so a handler of that has to look at ``os.getppid``.
        lost: called if the worker was killed, after its descendants were ended, with the signal and the first one of
            ``ENDING`` that was handed on (0: none).
        grace_s: how long the worker may take to end what it has started.
    """
    linux.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, told, kill_at = os.getpid(), 0, math.inf
    with linux.signals_wait(_TAKEN) as let_through:
        worker = os.fork()
        if worker == 0:
            _work(work, parent, let_through)
        while not linux.has_ended(worker):  # and until then it is not reaped, so its number is still its own
            taken = signal.sigtimedwait(_TAKEN, max(0.0, min(kill_at - time.monotonic(), 3600.0)))
            if time.monotonic() >= kill_at:
                os.kill(worker, signal.SIGKILL)
                kill_at = math.inf
            elif taken is not None and taken.si_signo != signal.SIGCHLD:
                os.kill(worker, taken.si_signo)
                if taken.si_signo in ENDING:
                    os.kill(worker, signal.SIGCONT)
                    told = told or taken.si_signo
                    kill_at = min(kill_at, time.monotonic() + grace_s + _WORKERS_OWN_S)
        told = told or min(signal.sigpending() & set(ENDING), default=0)  # they came with its end
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        # A signal that waits for us would end us as soon as it is let through: before that, nothing may be left below us.
        linux.kill_descendants()
        if code < 0:
            signal.alarm(_WORDS_S)
            lost(-code, told)
            signal.alarm(0)
        for number in (*ENDING, *OTHERS):  # there is nobody left to hand them on to
            signal.signal(number, signal.SIG_IGN)
    return 128 - code if code < 0 else code


def _work(work: Callable[[Callable[[], None]], int], parent: int, let_through: Callable[[], None]) -> None:
    """The worker's life; it ends here."""
    code = 1
    try:
        os.setsid()
        linux.die_with_parent(signal.SIGCONT)
        if os.getppid() == parent:
            code = work(let_through)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
