"""Messages of arrays between two ranks over MPI: without pickling, of any shape, on their way while the ranks compute.

A message is a header (JSON, in one small MPI message) and one or more MPI messages for each array. The receiver learns the shapes
from the header, so they may change from one message to the next.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm import Message
from hvdtrain.comm.links import Patience, pieces
from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE

#: Messages of one source that may come in before they are asked for: one is computed on while the next is on its way.
_AHEAD = 2
#: How often MPI gets to run while this rank computes: it moves large messages only within its own calls.
_POLL_S = 2e-4


class Mailbox:
    """Of the ranks of ``comm``, an mpi4py communicator that nobody else uses; ``mpi`` is the module ``mpi4py.MPI``.

    Args:
        near: of each rank, whether it is on this rank's host. To others, arrays go in pieces that MPI sends without asking first.
    """

    def __init__(self, comm: Any, mpi: Any, near: Sequence[bool]) -> None:
        self._comm, self._mpi, self._near = comm, mpi, near
        self._most = comm.Get_attr(mpi.TAG_UB) // 2
        self._lock = threading.Lock()
        self._going: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._expected: dict[int, deque[_Coming]] = {}
        self._error: BaseException | None = None
        self._is_open = True
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def send(self, message: Message, to: int, tag: int) -> None:
        if not 0 <= tag <= self._most:
            raise HvdtrainError(f"this MPI has tags up to {self._most}, and a message needs {tag}", "use fewer micro-batches")
        arrays = [np.asarray(array, order="C") for array in message.arrays]
        facts = [[array.dtype.str, list(array.shape)] for array in arrays]
        header = np.frombuffer(json.dumps([message.about, facts]).encode(), np.uint8)
        with self._running():
            requests = [self._comm.Isend(header, to, 2 * tag)]
            requests += [self._comm.Isend(piece, to, 2 * tag + 1) for array in arrays for piece in self._pieces(array, to)]
            self._going.append((requests, (header, *arrays)))

    def expect(self, places: Sequence[tuple[int, int]]) -> None:
        with self._running():
            for source, tag in places:
                self._expected.setdefault(source, deque()).append(_Coming(tag))

    def receive(self, source: int, tag: int, what: str) -> Message:
        with HERE.waits(what):
            patience = Patience()
            while True:
                with self._running():
                    queue = self._expected.setdefault(source, deque())
                    coming = next((each for each in queue if each.tag == tag), None)
                    if coming is None:
                        coming = _Coming(tag)
                        queue.appendleft(coming)
                    if coming.is_here:
                        queue.remove(coming)
                        return Message(coming.about, coming.arrays)
                patience.pause()

    def flush(self) -> None:
        with HERE.waits("the end of sending"):
            patience = Patience()
            while True:
                with self._running():
                    if not self._going:
                        return
                patience.pause()

    def close(self) -> None:
        self._is_open = False
        self._work.set()
        self._thread.join()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """With the lock, after all that can go on has done so; and what is not over then goes on in the thread."""
        with self._lock:
            if self._error is not None:
                raise HvdtrainError(f"messages between ranks failed: {self._error}") from self._error
            self._go_on()
            yield
            if self._is_busy:
                self._work.set()

    @property
    def _is_busy(self) -> bool:
        return bool(self._going) or any(not each.is_here for queue in self._expected.values() for each in queue)

    def _run(self) -> None:
        """In the thread."""
        while True:
            self._work.wait()
            if not self._is_open:
                return
            if self._lock.acquire(blocking=False):
                try:
                    self._go_on()
                    if not self._is_busy:
                        self._work.clear()
                except Exception as error:
                    self._error = error
                    return
                finally:
                    self._lock.release()
            time.sleep(_POLL_S)

    def _go_on(self) -> None:
        self._going = [each for each in self._going if not self._mpi.Request.Testall(each[0])]
        status = self._mpi.Status()
        for source, queue in self._expected.items():
            for coming, _ in zip(queue, range(_AHEAD), strict=False):
                if coming.requests is None and (found := self._comm.Improbe(source, 2 * coming.tag, status)) is not None:
                    self._begin(coming, source, found, status.Get_count(self._mpi.BYTE))
                if coming.requests is not None and not coming.is_here:
                    coming.is_here = self._mpi.Request.Testall(coming.requests)

    def _begin(self, coming: _Coming, source: int, found: Any, nbytes: int) -> None:
        """A header has come: make room for its arrays."""
        header = np.empty(nbytes, np.uint8)
        found.Recv(header)
        coming.about, facts = json.loads(header.tobytes())
        coming.arrays = tuple(np.empty(shape, dtype) for dtype, shape in facts)
        tag = 2 * coming.tag + 1
        parts = [piece for array in coming.arrays for piece in self._pieces(array, source)]
        coming.requests = [self._comm.Irecv(piece, source, tag) for piece in parts]

    def _pieces(self, array: NDArray[Any], other: int) -> list[NDArray[Any]]:
        flat = array.reshape(-1).view(np.uint8)
        return [flat] if self._near[other] else pieces(flat)


@dataclass
class _Coming:
    """A message on its way here."""

    tag: int
    about: Any = None
    arrays: tuple[NDArray[Any], ...] = ()
    requests: list[Any] | None = None
    is_here: bool = False
