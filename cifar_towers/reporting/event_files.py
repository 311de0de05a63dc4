"""TensorBoard's event files: appended to, truncated after a step, and never a reason for a run to end."""

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from cifar_towers.files.best_effort import BestEffortWrites
from cifar_towers.files.run_files import EVENT_FILES, TRUNCATED_EVENTS

FLUSH_SECONDS = 10.0
ERRORS = (OSError, tf.errors.OpError)
_file_numbers = itertools.count()


class EventWriter:
    """Writes the event files of one directory, which TensorBoard shows as one run.

    A file is begun with the first event, and a new one after a failure, so that only what a full disk truncated is
    lost. A failure is logged once.
    """

    def __init__(self, directory: Path):
        self._directory, self._best_effort = directory, BestEffortWrites(directory, ERRORS)
        self._writer: tf.io.TFRecordWriter | None = None
        self._path = directory
        self._last_flush = time.monotonic()

    def write(self, step: int, values: Sequence[Summary.Value] = (), **fields) -> None:
        """Append one event: summary values of a step, or another field of `Event`, such as graph_def."""
        with self._best_effort():
            try:
                self._append(Event(step=step, summary=Summary(value=values) if values else None, **fields))
                if time.monotonic() > self._last_flush + FLUSH_SECONDS:
                    self._writer.flush()
                    self._last_flush = time.monotonic()
                    if not self._path.exists():  # it was removed; the next event begins a new file
                        self._close()
            except ERRORS:
                with contextlib.suppress(*ERRORS):
                    self._close()
                raise

    def truncate_after(self, step: int) -> None:
        """Remove all events after `step`. Each file is replaced atomically."""
        self.close()
        with self._best_effort():
            for path in sorted(self._directory.glob(EVENT_FILES)):
                events = list(read_events(path))
                remaining = [event for event in events if event.step <= step]
                if len(remaining) < len(events):
                    _replace(path, remaining)

    def flush(self) -> None:
        """Hand all events to the operating system."""
        with self._best_effort():
            if self._writer:
                self._writer.flush()

    def close(self) -> None:
        """End the file; the next event begins a new one."""
        with self._best_effort():
            self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            writer.close()

    def _append(self, event: Event) -> None:
        if not self._writer:
            self._directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, so those of one second are numbered.
            name = f"{time.time():.0f}.{platform.node()}.{os.getpid()}.{next(_file_numbers):06d}"
            self._path = self._directory / EVENT_FILES.replace("*", name)
            self._writer = tf.io.TFRecordWriter(str(self._path))
            self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, up to a truncated one."""
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            yield Event.FromString(record)
    except tf.errors.DataLossError:
        return


def _replace(path: Path, events: Sequence[Event]) -> None:
    temporary = path.with_name(TRUNCATED_EVENTS)
    try:
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for event in events:
                writer.write(event.SerializeToString())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
