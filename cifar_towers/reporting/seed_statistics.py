"""Mean and standard deviation over the seeds of a recipe, of every scalar in TensorBoard."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.plugins.scalar.metadata import PLUGIN_NAME as SCALARS
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_ndarray

from cifar_towers.files import EVENT_FILES, BestEffortWrites
from cifar_towers.reporting import tags
from cifar_towers.reporting.sample import Sample
from cifar_towers.reporting.tensorboard_writer import (
    ERRORS,
    EVAL,
    FILE_VERSION,
    TRAIN,
    charts_summary,
    make_event,
    new_event_file,
    read_events,
    write_events,
)

SECONDS_BETWEEN_UPDATES, SHARE_OF_TIME = 20.0, 0.01

Scalars = Mapping[tuple[str, int], float]  # (tag, step) -> value


class SeedStatistics:
    """The mean over runs of every scalar, for TensorBoard, at each step that any of the runs has.

    The event files are in `train` and `eval` of `directory`, as in a run. The runs may not exist yet, or be at work.
    """

    def __init__(self, directory: Path, runs: Sequence[Path], overwritten: Sequence[Path] = ()):
        """Ignore the present event files of the `overwritten` runs, which the start of the first run removes."""
        self._directory, self._runs = directory, runs
        self._read: dict[str, dict[tuple[Path, int], Scalars]] = {TRAIN: {}, EVAL: {}}  # by event file and its size
        self._ignored = {path for run in overwritten for part in self._read for path in (run / part).glob(EVENT_FILES)}

    def update(self) -> None:
        """Write the statistics anew, if a run has written since."""
        for part, known in self._read.items():
            paths = [path for run in self._runs for path in sorted((run / part).glob(EVENT_FILES))]
            found = [(path, path.stat().st_size) for path in paths if path not in self._ignored]
            if found != list(known):
                current = {file: known.get(file) or dict(read_scalars(file[0])) for file in found}
                self._write(part, current)
                self._read[part] = current  # after an error the next update tries again

    @contextlib.contextmanager
    def updated_in_background(self) -> Iterator[None]:
        """Update now and then during the block, in a small share of the time, and after it."""
        ended = threading.Event()

        def keep_updating():
            pause = SECONDS_BETWEEN_UPDATES
            while not ended.wait(pause):
                began = time.monotonic()
                with contextlib.suppress(*ERRORS):  # the run that trains may replace a file meanwhile
                    self.update()
                pause = max(SECONDS_BETWEEN_UPDATES, (time.monotonic() - began) / SHARE_OF_TIME)

        thread = threading.Thread(target=keep_updating, name="seed statistics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with BestEffortWrites(self._directory, ERRORS):
                self.update()

    def _write(self, part: str, read: Mapping[tuple[Path, int], Scalars]) -> None:
        """Replace the event file of a directory. TensorBoard forgets the events before one that starts a session."""
        runs: dict[Path, dict] = {run / part: {} for run in self._runs}
        for (path, _), scalars in read.items():
            runs[path.parent].update(scalars)
        found: set[tuple[str, int]] = set().union(*runs.values())
        summaries: dict[int, list] = {}
        for tag, step in sorted(found):
            values = [scalars.get((tag, step), math.nan) for scalars in runs.values()]
            summaries.setdefault(step, []).extend(_summaries(tag, list(filter(math.isfinite, values))))
        directory = self._directory / part
        directory.mkdir(parents=True, exist_ok=True)
        earlier, charts = sorted(directory.glob(EVENT_FILES)), tags.seed_charts({tag for tag, _ in found})
        events = [
            make_event(0, file_version=FILE_VERSION),
            make_event(0, session_log=SessionLog(status=SessionLog.START)),
            make_event(0, [charts_summary(charts, (tags.SEED_MEAN, tags.SEED_LOW, tags.SEED_HIGH))]),
            *(make_event(step, summaries[step]) for step in sorted(summaries)),
        ]
        write_events(new_event_file(directory), events)
        for path in earlier:
            path.unlink(missing_ok=True)


def _summaries(tag: str, values: Sequence[float]) -> Iterator:
    if not values:
        return
    mean, std, count = Sample.of(values)
    low, high = mean - std, mean + std
    prefixes = tags.SEED_MEAN, tags.SEED_STD, tags.SEED_COUNT, tags.SEED_LOW, tags.SEED_HIGH
    for prefix, value in zip(prefixes, (mean, std, count, low, high), strict=True):
        yield scalar_pb(prefix + tag, value)


def read_scalars(path: Path) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the scalars of an event file, each as ((tag, step), value)."""
    for event in read_events(path):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == SCALARS:
                yield (value.tag, event.step), float(make_ndarray(value.tensor))
