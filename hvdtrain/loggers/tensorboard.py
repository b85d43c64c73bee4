"""TensorBoard event files.

Only the record and message formats are taken from the tensorboard package: its ``SummaryWriter`` and PyTorch's import
TensorFlow wherever that is installed, tensorboardX imports PyTorch, each for seconds and into runs that use neither.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.state import TrainState

log = logging.getLogger(__name__)


class TensorBoardLogger:
    """One file a run, flushed at each log, since curves are looked at while the run goes on.

    A resumed run continues the curves: what the run before it logged beyond the checkpoint is marked as void. A file that could
    not be written to is left as it is: readers stop at half a record.
    Raises ``ImportError`` where the tensorboard package is not installed.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary, self._record_writer = Event, SessionLog, Summary, RecordWriter
        self._directory = directory
        self._records: Any = None
        self._failed = False

    def log(self, state: TrainState, values: Mapping[str, float], at: float | None = None) -> None:
        if self._failed:
            return
        figures = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        try:
            if self._records is None:
                self._begin(state.step)
            self._write(at, step=state.step, summary=self._summary(value=figures))
            self._records.flush()
        except OSError as error:
            self._failed = True
            log.warning("the curves in %s end here, they cannot be written: %s", self._directory, error.strerror or error)

    def close(self) -> None:
        if self._records is not None:
            with contextlib.suppress(OSError):  # flushed at each log: nothing is in it but what has failed already
                self._records.close()

    def _begin(self, step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, and at that only those with "tfevents" in them.
        name = f"events.out.tfevents.{time.time_ns():020}.{socket.gethostname()}.{os.getpid()}"
        self._records = self._record_writer((self._directory / name).open("xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=step, session_log=self._session(status=self._session.START))

    def _write(self, at: float | None = None, **content: Any) -> None:
        wall_time = time.time() if at is None else at
        self._records.write(self._event(wall_time=wall_time, **content).SerializeToString())
