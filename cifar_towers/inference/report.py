"""A report on one or several runs: a single HTML page with results, curves, errors, settings and
commands.

Runs that differ in their seed alone are one group: a mean in a table, and a curve with a band.
"""

import base64
import functools
import operator
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from cifar_towers import files
from cifar_towers.evaluation.score import score_name
from cifar_towers.reporting import figures
from cifar_towers.reporting.phase_timer import training_seconds
from cifar_towers.reporting.records import format_number, format_rate
from cifar_towers.runs.run import Run
from cifar_towers.runs.table import Group, compare_groups, flatten, group_by_recipe

Row = Mapping[str, str]  # cells of a table by heading; both may have a second line
Picture = tuple[str, bytes]  # description, PNG file
Curve = tuple[np.ndarray, ...]  # x and y [n]; perhaps the lower and upper edge of a band [n]

SHOWN_ELSEWHERE = {"command", "towers", "class_names"}
CURVES = (  # of training records: title, key, factor for the unit
    ("training loss", "loss", 1),
    ("training accuracy, %", "accuracy", 100),
    ("learning rate", "learning_rate", 1),
)
MAX_POINTS = 120  # of a curve
MAX_CURVES = 8  # that can be distinguished in one picture


def render(runs: Sequence[Run]) -> str:
    """Return the HTML of the report, which loads nothing; all texts are escaped."""
    groups = group_by_recipe(runs)
    repeated = [group for group in groups if len(group.runs) > 1 and group.finished]
    score_names: dict[str, None] = {}  # a set that keeps the order
    for run in runs:
        score_names |= dict.fromkeys(run.scores)
    commands = [shlex.join(run.environment.get("command", [])) for run in runs]
    differing, shared = _settings_rows(runs)

    return _template().render(
        title="; ".join(f"{group.name} ({group.describe_seeds()})" for group in groups),
        results=[_result_row(run, list(score_names)) for run in runs],
        means=[_mean_row(group, list(score_names)) for group in repeated],
        differences=compare_groups(groups),
        curves=curves(groups),
        errors=errors(runs),
        differing=differing,
        shared=shared,
        commands=list(dict.fromkeys(commands)),
    )


def _template() -> jinja2.Template:
    """Return the page's template, which escapes every text and refuses an unknown name."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cifar_towers.inference", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("report.html.jinja")


def _settings_rows(runs: Sequence[Run]) -> tuple[list[Row], list[Row]]:
    """Return a row for each setting in which runs differ, with a column per run, and a row for each
    setting that they share. Facts about the machine count as settings.
    """
    settings_of = {}
    keys: dict[str, None] = {}
    for run in runs:
        settings = flatten(run.config) | flatten(run.environment, SHOWN_ELSEWHERE)
        settings_of[run.name] = settings
        keys |= dict.fromkeys(settings)

    differing: list[Row] = []
    shared: list[Row] = []
    for key in keys:
        cells = {name: str(settings.get(key, "-")) for name, settings in settings_of.items()}
        values = set(cells.values())
        if len(values) > 1:
            differing.append({"setting": key, **cells})
        else:
            shared.append({"setting": key, "value": values.pop()})
    return differing, shared


def _result_row(run: Run, scores: Sequence[str]) -> Row:
    result = run.result or {}
    reported = run.reported_score
    last: Mapping[str, Any] = next(reversed(run.history), {})
    row = {
        "run": run.name,
        "data": result.get("dataset") or run.config.get("dataset", "-"),
        "accuracy, %\nas reported": "-",
    }
    row |= {f"accuracy, %\n{name}": "-" for name in scores}
    if reported:
        is_earlier = reported.get("step", run.step) < run.step
        at = f" at step {reported['step']:,}" if is_earlier else ""
        accuracy = f"{100 * reported['accuracy']:.2f}"
        row["accuracy, %\nas reported"] = f"{accuracy}\n{score_name(reported)}{at}"
    for name, score in run.scores.items():
        loss = format_number(score["loss"], ".4f")
        row[f"accuracy, %\n{name}"] = f"{100 * score['accuracy']:.2f}\nloss {loss}"

    rate = result.get("images_per_sec", last.get("images_per_sec"))
    seconds = f"{training_seconds(result['seconds']):,.1f}" if result else "-"
    steps = f"{run.step:,}" if result else f"{run.step:,}\nunfinished"
    skipped_steps = result.get("skipped_steps", last.get("skipped_steps"))
    return row | {
        "images/s": format_rate(rate),
        "training, s,\nwith input and\ncompilation": seconds,
        "steps": steps,
        "seed": str(run.config.get("seed")),
        "towers": str(len(run.environment.get("towers", []))),
        "precision": run.environment.get("precision", "-"),
        "skipped\nsteps": format_number(skipped_steps, ",.0f"),
        "weights\nsha256": result.get("weights_sha256", "-")[:8],
    }


def _mean_row(group: Group, scores: Sequence[str]) -> Row:
    """Return mean, deviation and n of the accuracies of a group's finished runs."""
    means = group.means
    row = {"mean of": f"{group.name}\n{group.describe_seeds()}"}
    for name in scores:
        row[f"accuracy\n{name}"] = means[name].describe_percent() if name in means else "-"
    return row


def curves(groups: Sequence[Group]) -> list[Picture]:
    """Draw the accuracies without test-time augmentation, and `CURVES`, by epoch; a group is one
    line.
    """
    score_names: dict[str, None] = {}  # a set that keeps the order
    for group in groups:
        for run in group.runs:
            plain = [score for score in run.evaluations if not score["tta"]]
            score_names |= dict.fromkeys(map(score_name, plain))

    pictures: list[Picture] = []
    for name in score_names:
        lines = _group_lines(groups, functools.partial(_scores_named, name), "accuracy", 100)
        pictures += _draw_lines(lines, f"{name} accuracy, %")
    for title, key, scale in CURVES:
        lines = _group_lines(groups, operator.attrgetter("history"), key, scale)
        pictures += _draw_lines(lines, title)
    return pictures


def _scores_named(name: str, run: Run) -> list[dict]:
    """Return the evaluations of a run that have this name."""
    return [score for score in run.evaluations if score_name(score) == name]


def _group_lines(
    groups: Sequence[Group], records_of: Callable[[Run], Sequence[Mapping]], key: str, scale: float
) -> dict[str, Curve]:
    """Return the mean curve of each group whose runs have values of `key` in their records."""
    lines = {}
    for group in groups:
        histories = []
        for run in group.runs:
            records = [record for record in records_of(run) if record.get(key) is not None]
            if records:
                histories.append({record["epoch"]: scale * record[key] for record in records})
        if histories:
            lines[group.name] = mean_curve(histories)
    return lines


def _draw_lines(lines: Mapping[str, Curve], title: str) -> Iterator[Picture]:
    """Draw lines by epoch, in pictures of up to `MAX_CURVES`."""
    names = list(lines)
    for start in range(0, len(names), MAX_CURVES):
        part = {name: lines[name] for name in names[start : start + MAX_CURVES]}
        ends = []
        for name, (_, values, *_) in part.items():
            ends.append(f"{name} {values[-1]:,.4g}")
        description = f"{title} by epoch; last point: {'; '.join(ends)}"
        yield description, figures.line_plot(part, title)


def mean_curve(histories: Sequence[Mapping[float, float]]) -> Curve:
    """Return epochs [n] and mean [n] of runs {epoch: value}. For several runs, mean - standard
    deviation [n] and mean + standard deviation [n] follow.

    If there are more than `MAX_POINTS` epochs, neighbors are averaged first.
    """
    epochs = np.array(sorted(set().union(*histories)))
    values = np.full([len(histories), len(epochs)], np.nan)
    for run, history in enumerate(histories):
        values[run] = [history.get(epoch, np.nan) for epoch in epochs]
    known = np.ma.masked_invalid(values)

    parts = np.array_split(np.arange(len(epochs)), min(len(epochs), MAX_POINTS))
    x = np.array([epochs[part].mean() for part in parts])
    y = np.ma.stack([known[:, part].mean(1) for part in parts])  # [n, runs]
    mean = y.mean(1)
    if len(histories) == 1:
        return x, mean
    std = y.std(1, ddof=1).filled(0)
    return x, mean, mean - std, mean + std


def errors(runs: Sequence[Run]) -> list[Picture]:
    """Return the confusion matrix and the most confident mistakes of each run, as far as it has
    drawn them.
    """
    pictures: list[Picture] = []
    for run in runs:
        confusion = run.directory / files.CONFUSION
        if confusion.exists():
            pictures.append((f"confusion matrix of {run.name}", confusion.read_bytes()))
        mistakes = run.directory / files.MISTAKES
        if mistakes.exists():
            pictures.append((f"most confident mistakes of {run.name}", mistakes.read_bytes()))
    return pictures
