"""A report on one or several runs: a single HTML page with results, curves, errors, settings and
commands.

Runs that differ in their seed alone are one group: a mean in a table, and a curve with a band.
"""

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
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
    scores = list(dict.fromkeys(name for run in runs for name in run.scores))
    properties = {
        run.name: flatten(run.config) | flatten(run.environment, SHOWN_ELSEWHERE) for run in runs
    }
    keys = dict.fromkeys(key for values in properties.values() for key in values)
    settings = {
        key: {name: str(values.get(key, "-")) for name, values in properties.items()}
        for key in keys
    }
    differing = {key for key, cells in settings.items() if len({*cells.values()}) > 1}
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    loader = jinja2.PackageLoader("cifar_towers.inference", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("report.html.jinja").render(
        title="; ".join(f"{group.name} ({group.describe_seeds()})" for group in groups),
        results=[_result_row(run, scores) for run in runs],
        means=[
            _mean_row(group, scores) for group in groups if len(group.runs) > 1 and group.finished
        ],
        differences=compare_groups(groups),
        curves=curves(groups),
        errors=errors(runs),
        differing=[{"setting": key} | settings[key] for key in settings if key in differing],
        shared=[
            {"setting": k, "value": next(iter(v.values()))}
            for k, v in settings.items()
            if k not in differing
        ],
        commands=list(
            dict.fromkeys(shlex.join(run.environment.get("command", [])) for run in runs)
        ),
    )


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
        at = f" at step {reported['step']:,}" if reported.get("step", run.step) < run.step else ""
        row["accuracy, %\nas reported"] = (
            f"{100 * reported['accuracy']:.2f}\n{score_name(reported)}{at}"
        )
    for name, score in run.scores.items():
        loss = format_number(score["loss"], ".4f")
        row[f"accuracy, %\n{name}"] = f"{100 * score['accuracy']:.2f}\nloss {loss}"
    return row | {
        "images/s": format_rate(result.get("images_per_sec", last.get("images_per_sec"))),
        "training, s\nwith input and compilation": f"{training_seconds(result['seconds']):,.1f}"
        if result
        else "-",
        "steps": f"{run.step:,}" + "\nunfinished" * (not result),
        "seed": str(run.config.get("seed")),
        "towers": str(len(run.environment.get("towers", []))),
        "precision": run.environment.get("precision", "-"),
        "skipped steps": format_number(
            result.get("skipped_steps", last.get("skipped_steps")), ",.0f"
        ),
        "weights\nsha256": result.get("weights_sha256", "-")[:16],
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
    scores = [s for group in groups for run in group.runs for s in run.evaluations if not s["tta"]]
    pictures: list[Picture] = []
    for name in dict.fromkeys(map(score_name, scores)):
        records = {
            group.name: [
                [s for s in run.evaluations if score_name(s) == name] for run in group.runs
            ]
            for group in groups
        }
        pictures += _draw_lines(records, f"{name} accuracy, %", "accuracy", 100)
    training = {group.name: [run.history for run in group.runs] for group in groups}
    for curve in CURVES:
        pictures += _draw_lines(training, *curve)
    return pictures


def _draw_lines(
    records: Mapping[str, Sequence[Sequence[Mapping]]], title: str, key: str, scale: float
) -> Iterator[Picture]:
    """Draw a line per group that has values of `key`, in pictures of up to `MAX_CURVES`."""
    lines = {}
    for name, runs in records.items():
        histories = [
            {r["epoch"]: scale * r[key] for r in run if r.get(key) is not None} for run in runs
        ]
        if any(histories):
            lines[name] = mean_curve([history for history in histories if history])
    for start in range(0, len(lines), MAX_CURVES):
        part = dict(list(lines.items())[start : start + MAX_CURVES])
        ends = "; ".join(f"{name} {y[-1]:,.4g}" for name, (_, y, *_) in part.items())
        yield f"{title} by epoch; at the end: {ends}", figures.line_plot(part, title)


def mean_curve(histories: Sequence[Mapping[float, float]]) -> tuple[np.ndarray, ...]:
    """Return epochs [n] and mean [n] of runs {epoch: value}; of several, also mean -/+ standard
    deviation [n].

    If there are more than `MAX_POINTS` epochs, neighbors are averaged first.
    """
    epochs = np.array(sorted(set().union(*histories)))
    runs = np.ma.masked_invalid(
        [[history.get(epoch, np.nan) for epoch in epochs] for history in histories]
    )
    parts = np.array_split(np.arange(len(epochs)), min(len(epochs), MAX_POINTS))
    x = np.array([epochs[part].mean() for part in parts])
    values = np.ma.stack([runs[:, part].mean(1) for part in parts])
    mean = values.mean(1)
    std = values.std(1, ddof=1).filled(0)
    return (x, mean, mean - std, mean + std) if len(histories) > 1 else (x, mean)


def errors(runs: Sequence[Run]) -> list[Picture]:
    """Return the confusion matrix and the most confident mistakes of each run, as far as it has
    drawn them.
    """
    kinds = {"confusion matrix": files.CONFUSION, "most confident mistakes": files.MISTAKES}
    pictures = {
        f"{kind} of {run.name}": run.directory / file
        for run in runs
        for kind, file in kinds.items()
    }
    return [(text, path.read_bytes()) for text, path in pictures.items() if path.exists()]
