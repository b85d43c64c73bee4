"""One process too many, so that nothing is left behind when one is killed. Standard library only; used on every host.

``keeper -> worker -> what it starts``. If the worker is killed, even by SIGKILL, its descendants become the keeper's, which ends
them. If the keeper is killed, the kernel tells the worker, which ends its descendants as for any SIGTERM. The worker is in a
session of its own, so that a signal to the keeper's process group does not reach both.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from hvdtrain.launch import linux

#: What asks for an end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: What is handed on without a meaning of ours.
OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def keep(work: Callable[[Callable[[], None]], int], lost: Callable[[int, int], None]) -> int:
    """Run ``work`` in a process of its own, hand on the signals that we get, and return its exit code (128 + n for signal n).

    Args:
        work: is given a function to call when it is ready for signals; until then they wait.
        lost: called if the worker was killed, after its descendants were ended, with the signal and the first one of
            ``ENDING`` that was handed on (0: none).
    """
    linux.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, told = os.getpid(), 0
    with linux.signals_wait({*ENDING, *OTHERS, signal.SIGCHLD}) as let_through:
        worker = os.fork()
        if worker == 0:
            _work(work, parent, let_through)
        while not linux.has_ended(worker):
            number = signal.sigwait({*ENDING, *OTHERS, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                told = told or (number if number in ENDING else 0)
                os.kill(worker, number)  # not reaped yet, so the number is still its own
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    linux.kill_descendants()
    if code < 0:
        lost(-code, told)
    return 128 - code if code < 0 else code


def _work(work: Callable[[Callable[[], None]], int], parent: int, let_through: Callable[[], None]) -> None:
    """The worker's life; it ends here."""
    code = 1
    try:
        os.setsid()
        linux.die_with_parent(signal.SIGTERM)
        if os.getppid() == parent:
            code = work(let_through)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
