"""The runs below a directory: what they train, how far they are, what they reached, and which are
repetitions.

No function here needs TensorFlow.
"""

import itertools
import json
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from cifar_towers import files
from cifar_towers.errors import UsageError, printable
from cifar_towers.evaluation.score import reported_score, score_name
from cifar_towers.reporting.records import align_columns
from cifar_towers.runs.run import Run

COLUMNS = (
    "recipe",
    "data",
    "state",
    "step",
    "split",
    "accuracy",
    "tta_accuracy",
    "images_per_sec",
    "minutes",
)
NOTE = """accuracy, tta_accuracy: without and with test-time augmentation
minutes: with start, compilation and evaluation, without time that a kill lost"""


def find_runs(root: Path, *patterns: str) -> list[Run]:
    """Return the runs in and below `root`, sorted by directory.

    Args:
      patterns: patterns of the shell for the last parts of the path of a run, or of a directory
        that it is in, e.g. `speed94*`; default: all runs.

    Raises:
      UsageError: there is no such directory.
    """
    if not root.is_dir():
        raise UsageError(
            f"there is no directory {root}; name the one with your runs as --runs_dir, or train "
            "first"
        )
    directories = sorted(path.parent for path in root.rglob(files.CONFIG))
    runs = [Run(directory, str(directory.relative_to(root))) for directory in directories]
    if patterns:
        runs = [run for run in runs if _is_named(run, patterns)]
    # other programs may have a config.json, too
    return [run for run in runs if "train_dir" in run.config]


def _is_named(run: Run, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns is for a run, or for a directory below the root."""
    path = Path(run.name)
    within_root = [path, *path.parents]
    return any(place.match(pattern) for place, pattern in itertools.product(within_root, patterns))


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Return the runs in and below these directories, each once, named by their paths below a
    common directory.

    Raises:
      UsageError: a directory holds no run.
    """
    paths: list[Path] = []
    for directory in directories:
        found = find_runs(directory) if directory.is_dir() else []
        if not found:
            raise UsageError(
                f"{directory} holds no run; give directories of runs, e.g. runs/speed94-seed0"
            )
        paths += [run.directory.resolve() for run in found]
    common = os.path.commonpath([path.parent for path in paths])
    return [Run(path, str(path.relative_to(common))) for path in dict.fromkeys(paths)]


# The table ----------------------------------------------------------------------------------------


def describe(run: Run) -> dict[str, Any]:
    """Return what the table and `runs --json` show of a run. Accuracies are fractions."""
    config = run.config
    environment = run.environment
    result = run.result or {}
    scores = run.scores
    reported = run.reported_score or {}
    split = reported.get("split")
    rates = [record["images_per_sec"] for record in run.history if record.get("images_per_sec")]
    return {
        "run": str(run.directory),
        "recipe": run.title,
        "data": result.get("dataset") or config.get("dataset"),
        "seed": config.get("seed"),
        "towers": len(environment.get("towers", [])) or None,
        "state": run.state,
        "step": run.step,
        "split": split,
        "weights": reported.get("weights"),
        "accuracy": scores.get(f"{split}", {}).get("accuracy"),
        "tta_accuracy": scores.get(f"{split}_tta", {}).get("accuracy"),
        "images_per_sec": result.get("images_per_sec") or (rates[-1] if rates else None),
        "minutes": sum(result["seconds"].values()) / 60 if result else None,
        "revision": environment.get("git_revision"),
    }


def shared_score(runs: Sequence[Run]) -> str:
    """Return the name of the score by which runs are compared, or an empty string.

    All runs have it. The validation images come before the test images, which must not choose a
    setting, and test-time augmentation comes before none.
    """
    names = set.intersection(*(set(run.scores) for run in runs))
    shared = [score for name, score in runs[0].scores.items() if name in names]
    held_out = [score for score in shared if score["split"] == "validation"]
    compared = reported_score(held_out or shared)
    return score_name(compared) if compared else ""


def format_table(runs: Sequence[Run]) -> str:
    """Return a table with a line per run, whose columns are fields of `describe`, and a note about
    them.
    """
    rows = [[printable(run.name), *map(_cell, itemgetter(*COLUMNS)(describe(run)))] for run in runs]
    return f"{align_columns([['run', *COLUMNS], *rows], left=(0, 1, 2, 3, 5))}\n\n{NOTE}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if value <= 1 else f"{value:,.1f}"
    return "-" if value is None else printable(str(value))


# Groups of runs, and their differences ------------------------------------------------------------


class Group(NamedTuple):
    """Runs with the same settings, data, code of the user's and lineage, one of each seed."""

    name: str  # of the directory that holds only these runs, or of the recipe and what differs
    runs: list[Run]
    left_out: list[str]  # names of more runs with the same seeds

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished and run.scores]

    @property
    def means(self) -> dict[str, "Sample"]:
        """The statistics of the finished runs' accuracies, by name of the score (`test`)."""
        accuracies: dict[str, list[float]] = {}
        for run in self.finished:
            for name, score in run.scores.items():
                accuracies.setdefault(name, []).append(score["accuracy"])
        return {name: Sample.of(values) for name, values in accuracies.items()}

    def describe_seeds(self) -> str:
        """Return the group's seeds, as `seeds 0, 1`, with the runs that are left out."""
        seeds = ", ".join(str(run.config.get("seed")) for run in self.runs)
        described = f"seed {seeds}" if len(self.runs) == 1 else f"seeds {seeds}"
        if not self.left_out:
            return described
        return f"{described} (left out: {', '.join(self.left_out)}, of the same seed)"


def group_by_recipe(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed.

    Of several runs with one seed, the first finished one counts.
    """
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        recipe = json.dumps(run.recipe, sort_keys=True)
        by_recipe.setdefault(recipe, []).append(run)

    groups = []
    for members in by_recipe.values():
        others = [other for other in by_recipe.values() if other is not members]
        name = _shared_directory(members, others) or _distinct_recipe(members, others)
        counted = _count_seeds_once(members)
        left_out = [run.name for run in members if run not in counted]
        groups.append(Group(name, counted, left_out))
    return groups


def _shared_directory(members: Sequence[Run], others: Sequence[Sequence[Run]]) -> str:
    """Return the directory that holds all runs of a group and none of another, or an empty
    string.
    """
    directory = os.path.commonpath([Path(run.name).parent for run in members])
    if not directory:  # the one that holds all runs
        return ""
    for group in others:
        if any(Path(run.name).is_relative_to(directory) for run in group):
            return ""
    return directory


def _distinct_recipe(members: Sequence[Run], others: Sequence[Sequence[Run]]) -> str:
    """Return a group's recipe, with its values of the settings in which groups of this recipe
    differ.
    """
    title = members[0].title
    namesakes = [group[0].recipe for group in others if group[0].title == title]

    settings = []
    for key, value in members[0].recipe.items():
        if any(recipe.get(key) != value for recipe in namesakes):
            settings.append(f"{key}={value}")
    return ", ".join([title, *settings])


def _count_seeds_once(members: Sequence[Run]) -> list[Run]:
    """Return one run of each seed: the first finished one, or the first."""
    finished = [run for run in members if run.finished]
    unfinished = [run for run in members if not run.finished]

    by_seed: dict[Any, Run] = {}
    for run in finished + unfinished:
        by_seed.setdefault(run.config.get("seed"), run)
    return [run for run in members if run in by_seed.values()]


def summarize_groups(runs: Sequence[Run]) -> list[str]:
    """Return a line with the mean accuracies of each group of two or more finished runs. If there
    are two such groups, a line with their difference follows.

    For example `plain: test 93.90 ± 0.11 % (n=3), test_tta 94.08 ± 0.15 % (n=3)`.
    """
    groups = [group for group in group_by_recipe(runs) if len(group.finished) > 1]

    lines = []
    for group in groups:
        means = [f"{name} {mean.describe_percent()}" for name, mean in group.means.items()]
        lines.append(f"{group.name}: {', '.join(means)}")
    if len(groups) == 2:  # of more groups there are too many pairs to read here
        lines += compare_groups(groups)
    return [printable(line) for line in lines]


def explain_groups(runs: Sequence[Run]) -> list[str]:
    """Return a line that says in what runs differ which are not averaged; none if all are.

    For example `not averaged with each other: seeds 0, 2: net, num_gpus=2; seed 1: net,
    num_gpus=1`.
    """
    groups = group_by_recipe(runs)
    if len(groups) < 2:
        return []
    described = "; ".join(f"{group.describe_seeds()}: {group.name}" for group in groups)
    return [printable(f"not averaged with each other: {described}")]


def compare_groups(groups: Sequence[Group]) -> list[str]:
    """Return a line for every two groups with two finished runs each: the difference of their mean
    accuracies.

    For example `one - other: +4.40 points (Welch, 95 % -4.05 to +12.85), n=2 and 2; test`. The
    line names the score. Groups of other lengths or on other data are not subtracted; the line
    says so.
    """
    repeated = [group for group in groups if len(group.finished) > 1]
    return [_compare_two(one, other) for one, other in itertools.combinations(repeated, 2)]


def _compare_two(one: Group, other: Group) -> str:
    runs = one.finished + other.finished
    title = f"{one.name} - {other.name}"

    score = shared_score(runs)
    trained = {(run.step, str(run.environment.get("data_sha256"))) for run in runs}
    if not score or len(trained) > 1:
        return f"{title}: not compared, as their numbers of steps or their data differ"

    difference = describe_difference(one.means[score], other.means[score])
    parts = [f"{title}: {difference}", score]
    for group in (one, other):
        if group.left_out:
            parts.append(f"{group.name} is {group.describe_seeds()}")
    return "; ".join(parts)


# 97.5 % quantiles of Student's t distribution with 1, 2, ... 30 degrees of freedom, and infinity
# fmt: off
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    1.960,
)
# fmt: on


class Sample(NamedTuple):
    """Mean, standard deviation and number of values."""

    mean: float
    std: float  # of the sample (n - 1); 0 for a single value
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Compute the statistics of a non-empty list."""
        return cls(
            statistics.fmean(values),
            statistics.stdev(values) if len(values) > 1 else 0.0,
            len(values),
        )

    def describe_percent(self) -> str:
        """Return mean, standard deviation and n of fractions as percent.

        >>> Sample(0.9411, 0.0015, 5).describe_percent(), Sample(0.9411, 0.0, 1).describe_percent()
        ('94.11 ± 0.15 % (n=5)', '94.11 % (n=1)')
        """
        spread = f" ± {100 * self.std:.2f}" if self.n > 1 else ""
        return f"{100 * self.mean:.2f}{spread} % (n={self.n})"


def describe_difference(one: Sample, other: Sample) -> str:
    """Return the mean of `one` less that of `other`, of fractions, in percentage points with its
    95 % interval by Welch's t-test (B. L. Welch, Biometrika 34, 1947), which lets the two variances
    differ. Both samples need two or more values. If neither varies, there is no interval.

    >>> describe_difference(Sample(0.944, 0.0005, 2), Sample(0.9, 0.0095, 2))
    '+4.40 points (Welch, 95 % -4.05 to +12.85), n=2 and 2'
    """
    difference = one.mean - other.mean
    sizes = f"n={one.n} and {other.n}"
    variance_of_one = one.std**2 / one.n
    variance_of_other = other.std**2 / other.n
    variance = variance_of_one + variance_of_other
    if variance == 0:
        return f"{100 * difference:+.2f} points, {sizes}"

    degrees = variance**2 / (
        variance_of_one**2 / (one.n - 1) + variance_of_other**2 / (other.n - 1)
    )
    half = student_t(degrees) * math.sqrt(variance)
    interval = f"{100 * (difference - half):+.2f} to {100 * (difference + half):+.2f}"
    return f"{100 * difference:+.2f} points (Welch, 95 % {interval}), {sizes}"


def student_t(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, for one degree of freedom or more.

    Between whole numbers its logarithm is interpolated linearly in 1 / degrees, to 3 %.

    >>> f"{student_t(2):.3f}, {student_t(1.98):.2f}, {student_t(1e9):.2f}"
    '4.303, 4.35, 1.96'
    """
    largest = len(STUDENT_T) - 1  # the last quantile is infinity's
    below = max(1, min(math.floor(degrees), largest))
    inverse_below = 1 / below
    inverse_above = 1 / (below + 1) if below < largest else 0.0
    fraction = (inverse_below - 1 / degrees) / (inverse_below - inverse_above)
    return STUDENT_T[below - 1] * (STUDENT_T[below] / STUDENT_T[below - 1]) ** fraction


def flatten(
    values: Mapping[str, Any], leave_out: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Return the values of nested objects by their path.

    >>> flatten({"a": {"b": 1}, "c": "x"})
    {'a.b': 1, 'c': 'x'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in leave_out:
            continue
        if isinstance(value, dict):
            flat |= flatten(value, leave_out, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
