"""Buckets that travel compressed, or over a link of ours: threads take them in turn while backward goes on."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapters.torch_reducer import Bucket
from hvdtrain.compression import Compressor, Link
from hvdtrain.compression.feedback import handed, is_whole
from hvdtrain.errors import HvdtrainError

#: So long ``close`` waits for the bucket that is on its way: a network that is gone may never end it.
_PATIENCE_S = 5.0
#: As many buckets are on their way at a time: between two the network would stand still.
LINKS = 2


class _Job:
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.done = threading.Event()
        self.error: BaseException | None = None


class Compressed:
    """A carrier. On a GPU, buckets go through host memory.

    Each of ``links`` has a thread and takes its turn: while one waits for its network, another computes. All ranks give alike.
    """

    def __init__(self, compressor: Compressor, *links: Link) -> None:
        self.compressor, self._link = compressor, links[0]
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in links]
        self._turns = itertools.cycle(self._queues)
        #: why nothing is exchanged any more
        self._error: BaseException | None = None
        #: whether this rank has loaded what all owed together, and no step has followed
        self._is_whole = False
        # They may wait for a network that is gone: the end of the process does not wait for them.
        self._threads = [
            threading.Thread(target=self._work, args=pair, name=f"exchange of gradients {number}", daemon=True)
            for number, pair in enumerate(zip(self._queues, links, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, bucket: Bucket) -> _Job:
        self._is_whole = False
        job = _Job(bucket)
        next(self._turns).put(job)
        return job

    def is_done(self, handle: _Job) -> bool:
        return handle.done.is_set()

    def wait(self, handle: _Job) -> None:
        handle.done.wait()
        if handle.error is not None:
            raise handle.error

    def settle(self) -> None:
        """Collective, between steps. Rank 0's ``compressor.state()`` is whole then."""
        self.compressor.settle(self._link)

    def state(self) -> dict[str, Any]:
        return self.compressor.state()

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.compressor.load(state, primary=self._link.rank == 0)
        self._is_whole = is_whole(state)

    def handed(self) -> dict[str, Any]:
        """For the other ranks to ``load``. What each owes is its own, unless this one has loaded what all owed together."""
        return handed(self.compressor.state(), keep=not self._is_whole)

    def close(self) -> None:
        if self._error is None:
            self._error = HvdtrainError("the exchange of gradients is closed")
        for jobs in self._queues:
            jobs.put(None)
        ends_at = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether nothing uses the compressor any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, jobs: queue.SimpleQueue[_Job | None], link: Link) -> None:
        while (job := jobs.get()) is not None:
            if self._error is None:
                try:
                    self._exchange(job.bucket, link)
                except BaseException as error:  # belongs to the thread that waits
                    # What follows would wait for ranks that have given up, or meet those of the next round of an elastic job.
                    self._error = job.error = error
            else:
                job.error = self._error
            job.done.set()

    def _exchange(self, bucket: Bucket, link: Link) -> None:
        on_host = bucket.flat.detach().cpu()
        array, start, tensors = on_host.numpy(), 0, []
        for parameter in bucket.parameters:
            part = array[start : start + parameter.numel()]
            # In the order of its memory, which is the same on all ranks.
            tensors.append(part.reshape(len(parameter), -1) if parameter.dim() > 1 and len(parameter) else part)
            start += parameter.numel()
        with np.errstate(all="ignore"):  # what is not finite is found in the sum
            self.compressor.exchange(bucket.name, tensors, link)
        if bucket.flat.device.type != "cpu":
            bucket.flat.copy_(on_host)
