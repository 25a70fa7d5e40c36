"""Files beside the training: what cannot be written waits for its next time, or is missing, and training goes on."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distca.errors import system_words

logger = logging.getLogger(__name__)


@contextmanager
def warned_of(file: Path) -> Iterator[None]:
    """A file that cannot be written in here is a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be written (%s).", file, system_words(error))


class PatientFile:
    """A file to append to. What it did not take is written first at the next flush, so that nothing is torn.

    Args:
        path: of the file.
        mode: ``x`` for a new one, ``a`` for one that may exist.

    Attributes:
        waiting: bytes that are not on disk.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self._file = path.open(f"{mode}b", buffering=0)
        self.waiting = b""

    def write(self, content: bytes) -> None:
        """Take some bytes for the next flush."""
        self.waiting += content

    def flush(self) -> None:
        """Write what waits; OSError where not all of it can be written."""
        while self.waiting:
            self.waiting = self.waiting[self._file.write(self.waiting) :]

    def close(self) -> None:
        """Close it as it is."""
        self._file.close()


class EventFile(PatientFile):
    """A file of TensorBoard events. Its own writer has a thread, which ends with a traceback when the disk is full.

    Args:
        folder: where TensorBoard looks.
        purge_step: TensorBoard is told to hide this step and later ones of files before; None for none.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # A new name each time, in the order of time, as TensorBoard's own.
        super().__init__(
            folder / f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}", "x"
        )
        self._records: Any = RecordWriter(self)
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the figures of a step; loads of experts become histograms, and what else is no number is left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        loads = {key: value for key, value in values.items() if key.startswith("expert_load_layer_")}
        histograms = [Summary.Value(tag=key, histo=_histogram(load)) for key, load in loads.items()]
        self._add(Event(step=step, summary=Summary(value=scalars + histograms)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def _histogram(values: list[float]) -> Any:
    """How often which values occur, for TensorBoard."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    counts, edges = np.histogram(values, bins=min(len(values), 30))
    return HistogramProto(
        min=min(values),
        max=max(values),
        num=len(values),
        sum=sum(values),
        sum_squares=sum(value * value for value in values),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
