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

from cifar_towers.files import EVENT_FILES, BestEffortWrites, temporary_beside

ERRORS = (OSError, tf.errors.OpError)
_file_numbers = itertools.count()


class EventWriter:
    """The event files of one directory, which TensorBoard shows as one run.

    The first event begins a file. An event after a failure, or after the file was removed, begins another, so that only
    what a full disk truncated is lost. A failure is logged once.
    """

    def __init__(self, directory: Path):
        self._directory, self._best_effort = directory, BestEffortWrites(directory, ERRORS)
        self._path = directory
        self._writer: tf.io.TFRecordWriter | None = None

    def write(self, step: int, summaries: Sequence = (), **fields) -> None:
        """Append one event: `Summary` protos of a step, or another field of `Event`, such as graph_def."""
        if summaries:  # protos of TensorBoard's class or of TensorFlow's
            fields["summary"] = Summary.FromString(b"".join(summary.SerializeToString() for summary in summaries))
        with self._best_effort:
            try:
                writer = self._writer if self._writer and self._path.exists() else self._open()
                _append(writer, Event(step=step, **fields))
            except ERRORS:
                self.close()
                raise

    def truncate_after(self, step: int) -> None:
        """Remove all events after `step`. Each file is replaced atomically."""
        self.close()
        with self._best_effort:
            for path in sorted(self._directory.glob(EVENT_FILES)):
                events = list(read_events(path))
                remaining = [event for event in events if event.step <= step]
                if len(remaining) < len(events):
                    _replace(path, remaining)

    def close(self) -> None:
        """End the file; the next event begins a new one."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(*ERRORS):  # every event was flushed when it was written
            if writer:
                writer.close()

    def _open(self) -> tf.io.TFRecordWriter:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so those of one second are numbered.
        name = f"{time.time():.0f}.{platform.node()}.{os.getpid()}.{next(_file_numbers):06d}"
        self._path = self._directory / EVENT_FILES.replace("*", name)
        self._writer = tf.io.TFRecordWriter(str(self._path))
        _append(self._writer, Event(file_version="brain.Event:2"))
        return self._writer


def _append(writer: tf.io.TFRecordWriter, event: Event) -> None:
    event.wall_time = time.time()
    writer.write(event.SerializeToString())
    writer.flush()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file, up to a truncated one."""
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            yield Event.FromString(record)
    except tf.errors.DataLossError:
        return


def _replace(path: Path, events: Sequence[Event]) -> None:
    with temporary_beside(path.with_name("kept")) as temporary:  # TensorBoard reads names with `tfevents`
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for event in events:
                writer.write(event.SerializeToString())
        os.replace(temporary, path)
