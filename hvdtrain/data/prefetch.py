"""Batches that are loaded by a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

#: How long the thread waits for room in the queue before it looks whether it is still wanted.
_LOOK_S = 0.1
#: A source that hangs must not hold up the end; the thread is a daemon, and what it reads from has to expect it.
_END_S = 1.0


def ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """The same items in the same order, ``depth`` of them got before they are asked for. What getting raises is raised here.

    The thread gives the interpreter away as soon as ``items`` reads, waits or copies arrays; Python code shares it with the
    step. It begins with the first item that is asked for, and ends with this generator, or where an item takes long, with that.
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def load() -> None:
        try:
            for item in items:
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=load, name="hvdtrain-loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        closed.set()
        thread.join(timeout=_END_S)
