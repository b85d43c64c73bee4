"""Horovod's elastic driver as a rank sees it: this rank's place in the next world, and whether hosts have come or gone.

Horovod's initialisation asks the driver by itself, and then waits for ranks that are only being started. It waits no longer than
Gloo's timeout, which is short so that lost ranks are noticed soon, and when that is over the process is aborted: it is an
exception in a thread of C++ that nobody catches. So ranks take their places here, wait here until all of them are ready, and
then initialise Horovod with what they know.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain.progress import HERE

#: How long ranks that are ready wait for those that are being started, before they ask the driver for their places anew: it
#: answers when those are ready too, or have ended. It takes longer for a rank to start; for ranks that were there, it is enough.
PATIENCE_S = 3.0
#: How much longer the others wait for what rank 0 says then.
_MARGIN_S = 10.0
#: How long the driver may take: it waits for enough hosts, 600 s unless HOROVOD_ELASTIC_TIMEOUT says otherwise.
_DRIVER_S = 24 * 3600.0
#: After so long without a word, Gloo takes a rank for lost. Its threads talk all the time, however long a step takes.
_SILENT_S = 10
_POLL_S = 0.05
_FAILED_S = 5.0

#: A place as the driver writes it.
_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_SCOPE = "hvdtrain-meeting"


class LeftOutError(Exception):
    """The driver has no place for this rank any more: its host is no longer one of the job's."""


class HostChanges:
    """Whether the driver has told this rank that hosts came or went; it tells rank 0 alone."""

    def __init__(self) -> None:
        self.noticed = False

    def listen(self) -> None:
        """Let the driver know where to reach this rank."""
        from horovod.common.elastic import notification_manager

        notification_manager.init()
        notification_manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        self.noticed = True


def meet(environ: MutableMapping[str, str], *, again: bool) -> None:
    """Collective. Wait until all ranks of the next world are ready, and write this rank's place in it into ``environ``.

    Args:
        again: this process has had a place before, and needs a new one; else its launcher's variables hold its first.

    Raises:
        LeftOutError: there is no place for it.
        HvdtrainError: the driver is gone.
    """
    driver = _Driver(environ)
    while True:
        if again:
            driver.take_place(environ)
        if driver.all_ready(int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])):
            return
        again = True


@contextlib.contextmanager
def placed(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, Horovod initialises with the place that it finds and does not ask the driver.

    Lost ranks are noticed after 10 s instead of 30, unless the user says otherwise: no rank is waited for here any more.
    """
    environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(_SILENT_S))
    environ["HOROVOD_ELASTIC"] = "0"
    try:
        yield
    finally:
        environ["HOROVOD_ELASTIC"] = "1"


class _Driver:
    """The store over HTTP that the driver keeps: who asks for its place is noted as ready and hears of it when all are."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self._who = f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"

    def take_place(self, environ: MutableMapping[str, str]) -> None:
        """Returns when each rank of the last world is ready too or has ended, and there are hosts enough."""
        with HERE.waits("the driver, for this rank's place"):
            text = (self._ask("GET", f"rank_and_size/{self._who}", timeout_s=_DRIVER_S) or b"").decode()
        numbers = text.split(",")
        if len(numbers) != len(_NAMES):
            raise HvdtrainError(f"the elastic driver answered {text!r} where it should give this rank its place")
        if int(numbers[0]) < 0:
            raise LeftOutError
        environ.update({f"HOROVOD_{name}": number for name, number in zip(_NAMES, numbers, strict=True)})

    def all_ready(self, rank: int, size: int) -> bool:
        """Whether all of this world came; rank 0 decides for everyone. What is written here is gone with the next world."""
        self._ask("PUT", f"{_SCOPE}/{rank}", b"ready")
        with HERE.waits("the ranks that are not ready yet"):
            if rank:
                if (said := self._poll(f"{_SCOPE}/all", PATIENCE_S + _MARGIN_S)) is None:
                    self._ask("PUT", f"{_SCOPE}/all", b"no")  # rank 0 may still come
                return said == b"yes"
            ends_at = time.monotonic() + PATIENCE_S
            came = all(self._poll(f"{_SCOPE}/{other}", ends_at - time.monotonic()) for other in range(1, size))
            came = came and self._ask("GET", f"{_SCOPE}/all") is None
            self._ask("PUT", f"{_SCOPE}/all", b"yes" if came else b"no")
            return came

    def _poll(self, path: str, limit_s: float) -> bytes | None:
        ends_at = time.monotonic() + limit_s
        while (found := self._ask("GET", path)) is None and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
        return found

    def _ask(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 30.0) -> bytes | None:
        ends_at = time.monotonic() + _FAILED_S
        while True:
            connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
            try:
                connection.request(method, f"/{path}", body)
                answer = connection.getresponse()
                data = answer.read()
                return data if answer.status == http.client.OK else None
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > ends_at:
                    raise HvdtrainError(
                        f"the elastic driver (horovodrun) does not answer at {':'.join(map(str, self._address))}: {error}",
                        "the job is over; the same command with --run-dir goes on from its last checkpoint",
                    ) from None
                time.sleep(_POLL_S)
            finally:
                connection.close()
