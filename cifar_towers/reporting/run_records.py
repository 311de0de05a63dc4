"""Reads what runs recorded in their directories, and groups runs that differ in their seed alone.

A missing file or key, or a value of another type, counts as empty.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import names_with
from cifar_towers.errors import UsageError
from cifar_towers.reporting import jsonl

PER_RUN = names_with(TrainConfig, per_run=True)  # settings that may differ between the runs of a group
SYNTHETIC = "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10."


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The contents of a run's directory; `training` and `evaluations` are the records of metrics.jsonl by kind."""

    name: str
    directory: Path
    config: dict
    environment: dict
    result: dict  # empty if the run is not finished, or has been continued since
    step: int  # the last recorded one
    training: list[dict]
    evaluations: list[dict]

    @property
    def finished(self) -> bool:
        """Whether it has a result."""
        return bool(self.result)

    @property
    def title(self) -> str:
        """The recipe's name, or else the model's or the directory's."""
        return as_text(self.config.get("recipe") or self.config.get("model") or self.name)

    @property
    def precision(self) -> str:
        """The compute precision, with `auto` resolved where that is recorded."""
        return as_text(self.environment.get("precision", self.config.get("precision")))

    @property
    def towers(self) -> list[dict]:
        """Name and device of each tower."""
        return objects(self.environment.get("towers"))

    @property
    def banner(self) -> str:
        """The warning that the data is not CIFAR-10, whether synthetic data was requested or a fallback."""
        requested = "synthetic" in (self.config.get("dataset"), self.result.get("dataset"))
        return as_text(self.environment.get("synthetic_data") or (SYNTHETIC if requested else ""))

    @property
    def recipe(self) -> dict:
        """What the runs of a group have in common: settings, with `auto` resolved, and the data."""
        settings = {name: value for name, value in self.config.items() if name not in PER_RUN}
        digest = as_dict(self.environment.get("data_sha256")).get("train")
        data = "synthetic" if self.banner else digest or self.config.get("dataset")
        towers = len(self.towers) or self.config.get("num_gpus")
        return settings | {"precision": self.precision, "num_gpus": towers, "data": as_text(data)[:12]}

    @property
    def scores(self) -> dict[str, dict]:
        """The records of the newest evaluation by name, as `test, raw weights, TTA 2`."""
        step = self.result.get("step", max((record["step"] for record in self.evaluations), default=0))
        newest = (record for record in self.evaluations if record["step"] == step)
        return {score_name(score): score for score in (*objects(self.result.get("evaluations")), *newest)}

    def evaluations_without_tta(self, kind: str) -> list[dict]:
        """The records of all evaluations of this kind, as `test, raw weights`, without test-time augmentation."""
        return [score for score in self.evaluations if score_kind(score) == kind and not score.get("tta")]


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """The runs in these directories, named by the shortest ends of their paths that differ.

    Raises:
      UsageError: a directory is given twice, is missing, or holds no records of a run.
    """
    paths = [directory.resolve() for directory in directories]
    for path, directory in zip(paths, directories, strict=True):
        if not directory.is_dir():
            raise UsageError(f"there is no directory {directory}; give those of runs, as runs/speed94-seed0")
        if paths.count(path) > 1:
            raise UsageError(f"{directory} is given twice; a mean would count it twice")
    depths = itertools.count(1)
    depth = next(depth for depth in depths if len({path.parts[-depth:] for path in paths}) == len(paths))
    names = [str(Path(*path.parts[-depth:])) for path in paths]
    runs = [read_run(directory, name) for directory, name in zip(directories, names, strict=True)]
    for run in runs:
        if not run.training and not run.evaluations:
            raise UsageError(
                f"{run.directory} holds no records of a run in {files.METRICS}; give the directory of one, as "
                "runs/speed94-seed0"
            )
    return runs


def read_run(directory: Path, name: str) -> RunRecord:
    """What a run's directory holds; of one without records the step is 0.

    Raises:
      UsageError: the records cannot be read.
    """
    config, environment, result = (
        files.read_json_if_any(directory / file) for file in (files.CONFIG, files.ENVIRONMENT, files.RESULT)
    )
    metrics = directory / files.METRICS
    try:
        records = [record for record in jsonl.read_records(metrics) if isinstance(record["step"], int)]
    except OSError as error:
        raise UsageError(f"{metrics} cannot be read: {error.strerror}; give the directory of a run") from None
    training, evaluations = ([record for record in records if record["kind"] == kind] for kind in ("train", "eval"))
    step = max((record["step"] for record in (*training, *evaluations)), default=0)
    result = result if as_number(result.get("step")) >= step else {}
    return RunRecord(name, directory, config, environment, result, step, training, evaluations)


Groups = Mapping[str, Sequence[RunRecord]]  # the runs of each group by its name


def group_by_recipe(runs: Sequence[RunRecord]) -> Groups:
    """Groups runs that differ in their seed alone, named after the recipe and up to two settings that differ."""
    by_recipe = group_by(runs, lambda run: json.dumps(run.recipe, sort_keys=True))
    groups: dict[str, list[RunRecord]] = {}
    for group in by_recipe:
        recipe, title = group[0].recipe, group[0].title
        others = [other[0].recipe for other in by_recipe if other[0].title == title]
        differing = [key for key in recipe if any(other.get(key) != recipe[key] for other in others)]
        name = shorten(", ".join([title, *(f"{key}={as_text(recipe[key])}" for key in differing[:2])]), 44)
        numbered = (name + (f" #{number}" if number > 1 else "") for number in itertools.count(1))
        groups[next(name for name in numbered if name not in groups)] = group
    return groups


def group_by(runs: Sequence[RunRecord], key: Callable[[RunRecord], str]) -> list[list[RunRecord]]:
    """Runs with the same key together, in the order of the first of each."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def score_kind(score: Mapping) -> str:
    """The split and the weights of a score, as `test, raw weights`."""
    return f"{as_text(score.get('split'))}, {as_text(score.get('weights'))} weights"


def score_name(score: Mapping) -> str:
    """The split, weights and level of test-time augmentation of a score."""
    return f"{score_kind(score)}, {'TTA ' + as_text(score['tta']) if score.get('tta') else 'no TTA'}"


def as_list(value: Any) -> list:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[dict]:
    """The objects in a list, if it is one."""
    return [item for item in as_list(value) if isinstance(item, dict)]


def as_number(value: Any) -> float:
    """The value if it is a finite number, else NaN."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return value if is_number else math.nan


def format_number(value: Any, spec: str, scale: float = 1) -> str:
    """A number as text, `-` for any other value.

    >>> format_number(0.9415, ".2f", 100), format_number(None, ".2f")
    ('94.15', '-')
    """
    number = as_number(value) * scale
    return format(number, spec) if math.isfinite(number) else "-"


def as_text(value: Any) -> str:
    """Any value of a JSON file as text, `-` for none."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def shorten(text: str, length: int) -> str:
    """One line of at most `length` characters, without surrogates, which a picture cannot show."""
    text = " ".join(text.encode(errors="replace").decode().split())
    return text if len(text) <= length else text[: length - 1] + "…"


def format_seeds(group: Sequence[RunRecord]) -> str:
    """The seeds of a group, as `seeds 0, 1`."""
    return f"seed{'s' * (len(group) > 1)} {', '.join(as_text(run.config.get('seed')) for run in group)}"
