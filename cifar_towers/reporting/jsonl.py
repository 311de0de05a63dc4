"""metrics.jsonl, the records of a run; and writing of files that training does not depend on."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from cifar_towers.errors import error_text
from cifar_towers.files import atomic_io, run_files

log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends records to metrics.jsonl, one JSON object per line; an error of writing is logged once."""

    def __init__(self, train_dir: Path):
        self._path = train_dir / run_files.METRICS
        self._best_effort = BestEffortWrites(self._path)
        self._incomplete = False  # whether the last line may have been cut short

    def keep(self, condition: Callable[[dict], bool]) -> None:
        """Removes all records that do not meet the condition, as those after the checkpoint of a rollback."""
        with self._best_effort():
            kept = [record for record in read_records(self._path) if condition(record)]
            atomic_io.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def records(self, kind: str) -> list[dict]:
        """The records of one kind, `train` or `eval`."""
        with self._best_effort():
            return [record for record in read_records(self._path) if record["kind"] == kind]
        return []

    def write(self, **record) -> None:
        """Appends one record."""
        line = "\n" * self._incomplete + run_files.to_json(record) + "\n"
        self._incomplete = True
        with self._best_effort():
            with self._path.open("a") as file:
                file.write(line)
            self._incomplete = False


class BestEffortWrites:
    """Swallows write errors of a file or directory that training does not depend on; warns once.

    Use as `with best_effort():` around each write.
    """

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._warned = path, errors, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the errors are swallowed."""
        try:
            yield
        except self._errors as error:
            if not self._warned:
                log.warning("%s cannot be written (%s); training continues without it", self._path, error_text(error))
            self._warned = True


def best_effort_writes(path: Path) -> contextlib.AbstractContextManager[None]:
    """`BestEffortWrites` around a single write."""
    return BestEffortWrites(path)()


def read_records(path: Path) -> Iterator[dict]:
    """The records of a metrics.jsonl, if it exists, without lines that a crash or a full disk cut short."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"kind", "step"} <= record.keys():
            yield record
