"""Runs as their directories tell of them, and those that differ in nothing but the seed together.

A file or a key that is missing, or holds what it should not, is as if it were empty.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import names_with
from cifar_towers.errors import UsageError
from cifar_towers.files import run_files
from cifar_towers.reporting import jsonl

PER_RUN = names_with(TrainConfig, per_run=True)
SYNTHETIC = "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10."


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's directory holds; what is missing there is empty here."""

    name: str
    directory: Path
    config: dict
    environment: dict
    result: dict
    training: list[dict]
    evaluations: list[dict]

    @property
    def step(self) -> int:
        """The last one on record."""
        return max(record["step"] for record in (*self.training, *self.evaluations))

    @property
    def finished(self) -> bool:
        """Whether it has a result, and has not gone on since."""
        return as_number(self.result.get("step")) >= self.step

    @property
    def title(self) -> str:
        """The recipe's name, or else the model's or the directory's."""
        return as_text(self.config.get("recipe") or self.config.get("model") or self.name)

    @property
    def precision(self) -> str:
        """What it computed in, which `auto` does not tell."""
        return as_text(self.environment.get("precision", self.config.get("precision")))

    @property
    def towers(self) -> list[dict]:
        """Name and device of each."""
        return [tower for tower in as_list(self.environment.get("towers")) if isinstance(tower, dict)]

    @property
    def banner(self) -> str:
        """What must be said of data that is not CIFAR-10, whether it was asked for or stood in."""
        asked = "synthetic" in (self.config.get("dataset"), self.result.get("dataset"))
        return as_text(self.environment.get("synthetic_data") or (SYNTHETIC if asked else ""))

    @property
    def recipe(self) -> dict:
        """All that runs of one group have in common: settings, and what `auto` came to."""
        settled = {name: value for name, value in self.config.items() if name not in PER_RUN}
        digests = self.environment.get("data_sha256")
        digest = digests.get("train") if isinstance(digests, dict) else None
        data = "synthetic" if self.banner else digest or self.config.get("dataset")
        towers = len(self.towers) or self.config.get("num_gpus")
        return settled | {"precision": self.precision, "num_gpus": towers, "data": as_text(data)[:12]}

    @property
    def scores(self) -> dict[str, dict]:
        """The records of the newest evaluation by what they are of, as `test, raw weights, TTA 2`."""
        told = as_list(self.result.get("evaluations")) if self.finished else []
        step = self.result["step"] if self.finished else max((record["step"] for record in self.evaluations), default=0)
        told = [*told, *(record for record in self.evaluations if record["step"] == step)]
        return {which_of(score): score for score in told if isinstance(score, dict)}

    def plain(self, kind: str) -> list[dict]:
        """The records of all evaluations of this kind, as `test, raw weights`, without TTA."""
        return [score for score in self.evaluations if kind_of(score) == kind and not score.get("tta")]


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs in these directories, named by as much of their paths as tells them apart.

    Raises:
      UsageError: one of them is given twice, or holds no records of a run.
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
    return [_read(directory, name) for directory, name in zip(directories, names, strict=True)]


def _read(directory: Path, name: str) -> Run:
    objects = [
        run_files.read_json_if_any(directory / of) for of in (run_files.CONFIG, run_files.ENVIRONMENT, run_files.RESULT)
    ]
    try:
        told = [record for record in jsonl.read(directory / run_files.METRICS) if isinstance(record["step"], int)]
    except OSError as error:
        raise UsageError(
            f"{directory / run_files.METRICS} cannot be read: {error.strerror}; give a run's own"
        ) from None
    training, evaluations = ([record for record in told if record["kind"] == kind] for kind in ("train", "eval"))
    if not training and not evaluations:
        raise UsageError(
            f"{directory} holds no records of a run in {run_files.METRICS}; give one, as runs/speed94-seed0"
        )
    return Run(name, directory, *objects, training, evaluations)


Groups = Mapping[str, Sequence[Run]]  # runs that differ in nothing but the seed, by what they are called together


def grouped(runs: Sequence[Run]) -> Groups:
    """Runs that differ in nothing but the seed, by the recipe's name and what tells it from others of that name."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps(run.recipe, sort_keys=True), []).append(run)
    names: dict[str, list[Run]] = {}
    for group in alike.values():
        recipe, title = group[0].recipe, group[0].title
        others = [other[0].recipe for other in alike.values() if other[0].title == title]
        odd = [key for key in recipe if any(other.get(key) != recipe[key] for other in others)]
        name = shortened(", ".join([title, *(f"{key}={as_text(recipe[key])}" for key in odd[:2])]), 44)
        numbered = (name + (f" #{number}" if number > 1 else "") for number in itertools.count(1))
        names[next(name for name in numbered if name not in names)] = group
    return names


def kind_of(score: Mapping) -> str:
    """What a score is of, but for its augmentation."""
    return f"{as_text(score.get('split'))}, {as_text(score.get('weights'))} weights"


def which_of(score: Mapping) -> str:
    """What a score is of, with its augmentation."""
    return f"{kind_of(score)}, {'TTA ' + as_text(score['tta']) if score.get('tta') else 'no TTA'}"


def as_list(value: Any) -> list:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float:
    """The value if it is a finite number, else NaN."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return value if sound else math.nan


def as_figure(value: Any, form: str, scale: float = 1) -> str:
    """A number in words, `-` for what is none."""
    number = as_number(value) * scale
    return format(number, form) if math.isfinite(number) else "-"


def as_text(value: Any) -> str:
    """Any value of a JSON file, `-` for none."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def shortened(text: str, most: int) -> str:
    """On one line of at most so many characters, all of which a picture can hold."""
    text = " ".join(text.encode(errors="replace").decode().split())
    return text if len(text) <= most else text[: most - 1] + "…"


def seeds_of(group: Sequence[Run]) -> str:
    """`seeds 0, 1`."""
    return f"seed{'s' * (len(group) > 1)} {', '.join(as_text(run.config.get('seed')) for run in group)}"
