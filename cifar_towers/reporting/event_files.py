"""Event files, as TensorBoard reads them: written, cut back when a run goes back, and never a reason for it to end."""

import itertools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from cifar_towers.files.run_files import EVENT_FILES, TRUNCATED_EVENTS
from cifar_towers.reporting.jsonl import BestEffortWrites

FLUSHED_EVERY = 10.0  # seconds
ERRORS = (OSError, tf.errors.OpError)
_files = itertools.count()


class Events:
    """The event files of one directory, which TensorBoard shows as one run. A file is begun with the first event, and
    a new one after a failure, so that what a full disk cut short costs only itself."""

    def __init__(self, directory: Path):
        self._directory, self._going_on = directory, BestEffortWrites(directory, ERRORS)
        self._writer: tf.io.TFRecordWriter | None = None
        self._path = directory
        self._flushed = time.monotonic()

    def write(self, step: int, values: Sequence[Summary.Value] = (), **fields) -> None:
        """Appends one event: summary values of a step, or another field of `Event`, such as graph_def."""
        with self._going_on():
            try:
                self._append(Event(step=step, summary=Summary(value=values) if values else None, **fields))
                if time.monotonic() > self._flushed + FLUSHED_EVERY:
                    self._writer.flush()
                    self._flushed = time.monotonic()
                    if not self._path.exists():  # somebody removed it; the next event begins a new one
                        self._give_up()
            except ERRORS:
                self._give_up()
                raise

    def keep(self, last_step: int) -> None:
        """Drops all events after `last_step`, as a run does that goes back to it; each file is replaced whole."""
        self.close()
        with self._going_on():
            for path in sorted(self._directory.glob(EVENT_FILES)):
                events = list(read(path))
                kept = [event for event in events if event.step <= last_step]
                if len(kept) < len(events):
                    _replace(path, kept)

    def flush(self) -> None:
        """Hands everything to the operating system."""
        with self._going_on():
            if self._writer:
                self._writer.flush()

    def close(self) -> None:
        """Ends the file; another event begins a new one."""
        with self._going_on():
            writer, self._writer = self._writer, None
            if writer:
                writer.close()

    def _append(self, event: Event) -> None:
        if not self._writer:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Readers take the files by name, so those of one second have to sort in the order they were begun.
            name = EVENT_FILES.replace("*", f"{time.time():.0f}.{platform.node()}.{os.getpid()}.{next(_files):06d}")
            self._path = self._directory / name
            self._writer = tf.io.TFRecordWriter(str(self._path))
            self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer:
                writer.close()
        except ERRORS:
            pass


def read(path: Path) -> Iterator[Event]:
    """The events of a file, up to where it was cut short, if it was."""
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
