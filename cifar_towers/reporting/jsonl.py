"""metrics.jsonl, the records of a run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from cifar_towers import files
from cifar_towers.files import BestEffortWrites


class JsonlWriter:
    """Appends records to metrics.jsonl, one JSON object per line; an error of writing is logged once."""

    def __init__(self, train_dir: Path):
        self._path = train_dir / files.METRICS
        self._best_effort = BestEffortWrites(self._path)
        self._incomplete = False  # whether the last line may have been cut short

    def keep(self, condition: Callable[[dict], bool]) -> None:
        """Removes all records that do not meet the condition, as those after the checkpoint of a rollback."""
        with self._best_effort():
            kept = [record for record in read_records(self._path) if condition(record)]
            files.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def records(self, kind: str) -> list[dict]:
        """The records of one kind, `train` or `eval`."""
        with self._best_effort():
            return [record for record in read_records(self._path) if record["kind"] == kind]
        return []

    def write(self, **record) -> None:
        """Appends one record."""
        line = "\n" * self._incomplete + files.to_json(record) + "\n"
        self._incomplete = True
        with self._best_effort():
            with self._path.open("a") as file:
                file.write(line)
            self._incomplete = False


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
