"""The records of runs: written to metrics.jsonl, read from directories, and grouped by what the runs have in common."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import names_with
from cifar_towers.errors import UsageError
from cifar_towers.evaluation.score import reported_score, score_name
from cifar_towers.files import BestEffortWrites
from cifar_towers.reporting.sample import Sample, describe_difference

PER_RUN = names_with(TrainConfig, per_run=True)  # settings that may differ between the runs of a group
SYNTHETIC = "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10."


class JsonlWriter:
    """The records in metrics.jsonl, one JSON object per line; an error of writing is logged once."""

    def __init__(self, train_dir: Path):
        self._path = train_dir / files.METRICS
        self._best_effort = BestEffortWrites(self._path)
        self._incomplete = False  # whether the last line may have been cut short

    def keep(self, condition: Callable[[dict], bool]) -> None:
        """Remove all records that do not meet the condition, as on a rollback."""
        with self._best_effort:
            kept = [record for record in read_records(self._path) if condition(record)]
            files.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def records(self, kind: str) -> list[dict]:
        """Return the records of one kind, `train` or `eval`."""
        with self._best_effort:
            return [record for record in read_records(self._path) if record["kind"] == kind]
        return []

    def write(self, **record) -> None:
        line = "\n" * self._incomplete + files.to_json(record) + "\n"
        self._incomplete = True
        with self._best_effort:
            with self._path.open("a") as file:
                file.write(line)
            self._incomplete = False


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, if it exists, without lines that a crash or a full disk cut short."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"kind", "step"} <= record.keys():
            yield record


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The contents of a run's directory. A file that the run has not written yet is an empty object."""

    name: str
    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]  # empty if the run is not finished, or has been continued since
    step: int  # the last recorded one
    training: list[dict[str, Any]]  # records of metrics.jsonl
    evaluations: list[dict[str, Any]]  # records of metrics.jsonl

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @property
    def title(self) -> str:
        """The recipe's name, otherwise the model's or the directory's."""
        return self.config.get("recipe") or self.config.get("model") or self.name

    @property
    def precision(self) -> str:
        """The precision, with `auto` resolved if that is recorded."""
        return self.environment.get("precision") or self.config.get("precision") or "-"

    @property
    def towers(self) -> list[dict[str, str]]:
        """Name and device of each tower."""
        return self.environment.get("towers", [])

    @property
    def banner(self) -> str:
        """The warning that the data is not CIFAR-10, whether synthetic data was requested or a fallback."""
        requested = "synthetic" in (self.config.get("dataset"), self.result.get("dataset"))
        return self.environment.get("synthetic_data") or (SYNTHETIC if requested else "")

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that the runs of a group have in common, with the precision, towers and data that were used."""
        settings = {name: value for name, value in self.config.items() if name not in PER_RUN}
        # the next run may choose another value; with other micro-batches batch norm computes another function
        digests = self.environment.get("data_sha256") or {"train": self.config.get("dataset")}
        digests = {"train": "synthetic"} if self.banner else digests
        data = {f"{split}_data": as_text(digest)[:12] for split, digest in digests.items()}
        towers = len(self.towers) or self.config.get("num_gpus")
        return settings | {"precision": self.precision, "num_gpus": towers} | data

    @property
    def scored_step(self) -> int:
        """The step of the newest evaluation; 0 before the first."""
        return self.result.get("step", max((record["step"] for record in self.evaluations), default=0))

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The records of the newest evaluation by name, e.g. `test/raw_tta2`."""
        newest = [record for record in self.evaluations if record["step"] == self.scored_step]
        return {score_name(score): score for score in (*self.result.get("evaluations", []), *newest)}

    @property
    def reported_score(self) -> Mapping[str, Any] | None:
        """The score of the newest evaluation that the run reports; see `evaluation.score.reported_score`."""
        return reported_score(list(self.scores.values()))


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in these directories, and name them by the shortest ends of their paths that differ.

    Raises:
      UsageError: a directory is given twice, is missing, or holds no records of a run.
      DataError: a file is damaged.
    """
    paths = [directory.resolve() for directory in directories]
    for path, directory in zip(paths, directories, strict=True):
        if not directory.is_dir():
            raise UsageError(f"there is no directory {directory}; give those of runs, as runs/speed94-seed0")
        if paths.count(path) > 1:
            raise UsageError(f"{directory} is given twice; a mean would count it twice")
    depth = next(depth for depth in itertools.count(1) if len({path.parts[-depth:] for path in paths}) == len(paths))
    runs = [
        read_run(directory, str(Path(*path.parts[-depth:]))) for directory, path in zip(directories, paths, strict=True)
    ]
    for run in runs:
        if not run.training and not run.evaluations:
            raise UsageError(
                f"{run.directory} holds no records of a run in {files.METRICS}; give the directory of one, as "
                "runs/speed94-seed0"
            )
    return runs


def read_run(directory: Path, name: str) -> RunRecord:
    """Read what a run's directory holds; the step of a run without records is 0.

    Raises:
      UsageError: the records cannot be read.
      DataError: another file is damaged.
    """
    config, environment, result = (
        files.read_json_if_any(directory / file) for file in (files.CONFIG, files.ENVIRONMENT, files.RESULT)
    )
    metrics = directory / files.METRICS
    try:
        records = list(read_records(metrics))
    except OSError as error:
        raise UsageError(f"{metrics} cannot be read: {error.strerror}; give the directory of a run") from None
    training, evaluations = ([record for record in records if record["kind"] == kind] for kind in ("train", "eval"))
    step = max((record["step"] for record in (*training, *evaluations)), default=0)
    result = result if result.get("step", -1) >= step else {}
    return RunRecord(name, directory, config, environment, result, step, training, evaluations)


Groups = Mapping[str, Sequence[RunRecord]]  # the runs of each group by its name


def group_by_recipe(runs: Sequence[RunRecord]) -> Groups:
    """Group runs that differ only in the seed.

    A group is named after its recipe and up to two settings that distinguish it from other groups of this recipe.
    """
    by_recipe: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_recipe.setdefault(json.dumps(run.recipe, sort_keys=True), []).append(run)
    groups: dict[str, list[RunRecord]] = {}
    for group in by_recipe.values():
        recipe, title = group[0].recipe, group[0].title
        others = [other[0].recipe for other in by_recipe.values() if other[0].title == title]
        differing = [key for key in recipe if any(other.get(key) != recipe[key] for other in others)]
        name = shorten(", ".join([title, *(f"{key}={as_text(recipe[key])}" for key in differing[:2])]), 44)
        numbered = (name + (f" #{number}" if number > 1 else "") for number in itertools.count(1))
        groups[next(name for name in numbered if name not in groups)] = group
    return groups


def compare_groups(groups: Groups) -> list[str]:
    """Return a line for every two groups on one test set with two finished runs each.

    The line has the difference of the mean accuracies of one kind, e.g. `lr1.5 - lr0.3: +4.40 points (...)`. The kind
    is the one that all these runs report, otherwise one without test-time augmentation that all of them have.
    """
    scored = {name: [run for run in group if run.finished and run.scores] for name, group in groups.items()}
    lines = []
    for one, other in itertools.combinations([name for name, runs in scored.items() if len(runs) > 1], 2):
        runs = [*scored[one], *scored[other]]
        kinds = {score_name(score) for run in runs if (score := run.reported_score)}
        common = [score for name, score in runs[0].scores.items() if all(name in run.scores for run in runs)]
        compared = reported_score([score for score in common if len(kinds) == 1 or not score["tta"]])
        if compared and len({run.result.get("dataset") for run in runs}) == 1 and share_test_images(runs):
            kind = score_name(compared)
            means = [Sample.of([run.scores[kind]["accuracy"] for run in scored[name]]) for name in (one, other)]
            lines.append(f"{one} - {other}: {describe_difference(*means)}; {kind}")
    return lines


def share_test_images(runs: Sequence[RunRecord]) -> bool:
    """Return False if runs with images of one size recorded different digests of their test images."""
    known = {(run.recipe.get("image_size"), run.recipe["test_data"]) for run in runs if "test_data" in run.recipe}
    return len(known) == len({image_size for image_size, _ in known})


def format_number(value: float | None, spec: str, scale: float = 1) -> str:
    """Return a number as text, or `-` for None. JSON files hold `null` for unknown and non-finite numbers.

    >>> format_number(0.9415, ".2f", 100), format_number(None, ".2f")
    ('94.15', '-')
    """
    return "-" if value is None else format(value * scale, spec)


def format_rate(images_per_sec: float | None) -> str:
    """Return images per second as text, with a decimal if there are fewer than ten; `-` for None.

    >>> format_rate(1234.5), format_rate(0.42), format_rate(None)
    ('1,234', '0.4', '-')
    """
    return format_number(images_per_sec, ",.1f" if (images_per_sec or 0) < 10 else ",.0f")


def as_text(value: Any) -> str:
    """Return any value of a JSON file as text, `-` for None."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def flatten(values: Mapping[str, Any], leave_out: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their path.

    >>> flatten({"a": {"b": 1}, "c": "x"})
    {'a.b': 1, 'c': 'x'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in leave_out:
            flat |= flatten(value, leave_out, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows with equally many cells as aligned text; the columns `left` are left-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cell_formats = [f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)]
    return "\n".join("  ".join(cell_formats).format(*row).rstrip() for row in rows)


def shorten(text: str, length: int) -> str:
    """Return one line of at most `length` characters, without surrogates, which a picture cannot show."""
    text = " ".join(text.encode(errors="replace").decode().split())
    return text if len(text) <= length else text[: length - 1] + "…"


def format_seeds(group: Sequence[RunRecord]) -> str:
    """Return the seeds of a group, as `seeds 0, 1`."""
    return f"seed{'s' * (len(group) > 1)} {', '.join(as_text(run.config.get('seed')) for run in group)}"
