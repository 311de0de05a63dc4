"""The files of a run that other programs read: their names, and how they are read and written."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from cifar_towers.errors import error_text
from cifar_towers.files import atomic_io, run_files

log = logging.getLogger(__name__)


class JsonlWriter:
    """metrics.jsonl: one object a line, appended."""

    def __init__(self, train_dir: Path):
        self._path, self._going_on = train_dir / run_files.METRICS, BestEffortWrites(train_dir / run_files.METRICS)
        self._cut = False  # whether the last line may be but a part of one

    def keep(self, wanted: Callable[[dict], bool]) -> None:
        """Drops all records but those that are wanted, as the later ones when a run goes back to a checkpoint."""
        with self._going_on():
            kept = [record for record in read(self._path) if wanted(record)]
            atomic_io.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def of(self, kind: str) -> list[dict]:
        """The records of one kind, `train` or `eval`."""
        with self._going_on():
            return [record for record in read(self._path) if record["kind"] == kind]
        return []

    def write(self, **record) -> None:
        """Appends one record."""
        line, self._cut = "\n" * self._cut + run_files.to_json(record) + "\n", True
        with self._going_on():
            with self._path.open("a") as file:
                file.write(line)
            self._cut = False


class BestEffortWrites:
    """`with going_on():` around what writes for the user's eyes: if it cannot, that is said once and ends no run."""

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._said = path, errors, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one writing."""
        try:
            yield
        except self._errors as error:
            if not self._said:
                log.warning("%s cannot be written (%s); the run goes on without it", self._path, error_text(error))
            self._said = True


def best_effort_writes(path: Path):
    """Around the writing of one file that no run should end for."""
    return BestEffortWrites(path)()


def read(path: Path) -> Iterator[dict]:
    """The records of a metrics.jsonl, if there is one; lines that a crash or a full disk cut short are passed over."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"kind", "step"} <= record.keys():
            yield record
