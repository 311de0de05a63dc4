"""A report on one or several runs: a single HTML page with results, curves, confusion matrices, towers and settings.

Runs that differ in their seed alone are one group: a mean in the table, a curve with a band, one confusion matrix.
"""

import base64
import io
import json
import math
import os
import shlex
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from PIL import Image

from cifar_towers import files
from cifar_towers.errors import RunError, count, error_text
from cifar_towers.evaluation.score import score_name, wilson_interval
from cifar_towers.reporting import figures, run_records
from cifar_towers.reporting.phase_timer import training_seconds
from cifar_towers.reporting.run_records import Groups, RunRecord, as_text, flatten, format_number, format_rate, shorten
from cifar_towers.reporting.sample import Sample

Cell = str | tuple[str, str]  # a text, or a text and a smaller line below it
Row = Mapping[Any, Cell]  # content of a table by heading, which is a cell too

SHOWN_ELSEWHERE = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}
LISTINGS = (("model", "layer", ("parameters", "flops")), ("variables", "variable", ("bytes",)))
REPORTED: Cell = ("accuracy, %", "as reported")
CURVES = (  # key of a training record in metrics.jsonl, title, y axis, factor for its unit
    ("loss", "training loss (batch)", "loss", 1),
    ("accuracy", "training accuracy (batch)", "accuracy, %", 100),
    ("learning_rate", "learning rate", "learning rate", 1),
    ("gradient_norm", "gradient norm", "norm", 1),
    ("images_per_sec", "throughput", "images/s", 1),
    ("input_wait", "time waiting for input", "share of the time, %", 100),
    ("gradient_noise_scale", "gradient noise scale", "examples", 1),
)
CURVES_NOTE = (
    "A line is the mean of a group's runs, and its band is one standard deviation to either side. Where some runs have "
    "ended, both are of the others. A run is interpolated between its records. In a long run, a point of a training "
    "curve is the mean of several records."
)
MAX_POINTS = 120  # of a curve of training records
MAX_CURVES = 8  # that can be distinguished in one picture


class Picture(NamedTuple):
    """A PNG file's bytes, its alternative text, and a caption above it."""

    png: bytes
    alt: str
    caption: str = ""


class Table(NamedTuple):
    """A table, folded below its summary if it has one. The first row has all columns."""

    rows: Sequence[Row]
    text_columns: int = 1  # number of columns that are aligned left, as text; the others hold numbers
    highlighted: Sequence[int] = ()  # indices of rows
    summary: str = ""


class Section(NamedTuple):
    """Parts of a page in their order. A section without pictures, rows and commands is left out."""

    title: str
    intro: str = ""
    pictures: Sequence[Sequence[Picture]] = ()  # in rows
    tables: Sequence[Table] = ()
    commands: Sequence[tuple[str, str]] = ()  # a line above it or an empty string, a shell command
    note: str = ""


def render_page(title: str, sections: Sequence[Section], banners: Sequence[str] = ()) -> str:
    """Return the HTML of a page that loads nothing; all texts are escaped."""
    loader = jinja2.PackageLoader("cifar_towers.reporting", ".")
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    sections = [section._replace(tables=[table for table in section.tables if table.rows]) for section in sections]
    shown = [section for section in sections if any(section.pictures) or section.tables or section.commands]
    return environment.get_template("report.html.jinja").render(title=title, sections=shown, banners=banners)


def write(runs: Sequence[RunRecord], out: Path) -> Path:
    """Write the report on these runs to the file `out`, and return its path.

    Raises:
      RunError: the file cannot be written.
    """
    if not os.path.isdir(out.parent):
        reason = f"there is no directory {out.parent}"
    elif os.path.exists(out) and not os.path.isfile(out):
        reason = "it exists and is not a file"
    else:
        html = render(runs).encode(errors="replace").decode()  # a name may hold surrogates
        try:
            files.write_whole(out, html.encode("ascii", "xmlcharrefreplace"))  # readable in any locale
            return out
        except OSError as error:
            reason = error_text(error)
    raise RunError(f"{out} cannot be written: {reason}; name another with --out=FILE")


def render(runs: Sequence[RunRecord]) -> str:
    groups = run_records.group_by_recipe(runs)
    title = "; ".join(f"{name} ({run_records.format_seeds(group)})" for name, group in groups.items())
    sections = [
        _results(groups),
        Section("Curves", CURVES_NOTE, [curves(groups)]),
        _errors(groups, runs),
        _towers(runs),
        _times(runs),
        _comparison("Settings", {run.name: flatten(run.config) for run in runs}),
        _comparison("Environment", {run.name: flatten(run.environment, SHOWN_ELSEWHERE) for run in runs}),
        Section(
            "Command",
            commands=_distinct(runs, [shlex.join(run.environment.get("command", [])) for run in runs]),
            note="A finished run is not repeated in its own directory: give another --train_dir.",
        ),
        Section("Model and variables", tables=list(_listings(runs))),
    ]
    banners = [owners + banner for owners, banner in _distinct(runs, [run.banner for run in runs])]
    return render_page(shorten(title, 200), sections, banners)


def _results(groups: Groups) -> Section:
    """Make a row per run, a row with the mean over the finished runs of each group of several, and the differences."""
    names = dict.fromkeys(name for group in groups.values() for run in group for name in run.scores)
    rows: list[Row] = []
    means = []
    for name, group in groups.items():
        rows += [_result_row(run, names) for run in group]
        finished = [run for run in group if run.finished]
        if len(group) > 1 and finished:
            means.append(len(rows))
            spreads = {("accuracy, %", score): _spread([run.scores.get(score) for run in finished]) for score in names}
            rows.append({"run": f"{name}: mean", REPORTED: _spread([run.reported_score for run in finished])} | spreads)
    headings = "group", "less the group", "difference of the accuracies"
    differences = [dict(zip(headings, row, strict=True)) for row in run_records.compare_groups(groups)]
    note = (
        "A run reports the accuracy on the test set, of the averaged weights if it keeps an average, with the most "
        "test-time augmentation that it scored. The other columns show every score of the newest evaluation, with its "
        "mean cross entropy below."
    )
    if means:
        note += " ± is the standard deviation over the n finished runs, with the 95 % interval of the mean."
    if differences:
        note += " The interval of a difference is Welch's: one that holds 0 does not tell the groups apart."
    tables = [Table(rows, highlighted=means), Table(differences, text_columns=3)]
    return Section("Results", tables=tables, note=note)


def _result_row(run: RunRecord, score_names: Iterable[str]) -> Row:
    result, last, reported = run.result, run.training[-1] if run.training else {}, run.reported_score
    seconds = result.get("seconds", {})
    training = training_seconds(seconds)
    state = "" if run.finished else "unfinished"
    at = f", at step {run.scored_step:,}" if run.scored_step < run.step else ""
    if result.get("reached"):
        state = f"reached {100 * result['reached']:.2f} %"
    skipped, rollbacks = result.get("skipped_steps", last.get("skipped_steps")), result.get("rollbacks")
    scores: dict[Any, Cell] = {("accuracy, %", name): "-" for name in score_names}
    for name, score in run.scores.items():
        scores["accuracy, %", name] = f"{100 * score['accuracy']:.2f}", f"loss {format_number(score['loss'], '.4f')}"
    return {
        "run": run.name,
        REPORTED: (f"{100 * reported['accuracy']:.2f}", score_name(reported) + at) if reported else "-",
        **scores,
        ("training loss", "last record"): format_number(last.get("loss"), ".4f"),
        "images/s": format_rate(result.get("images_per_sec", last.get("images_per_sec"))),
        ("training, s", "with input, compilation, lost steps"): f"{training:,.1f}" if seconds else "-",
        "steps": (f"{run.step:,}", state),
        "recipe": run.title,
        "seed": as_text(run.config.get("seed")),
        "towers": as_text(len(run.towers) or None),
        "precision": run.precision,
        "skipped steps": (format_number(skipped, ",.0f"), count(rollbacks, "rollback") if rollbacks else ""),
        ("weights", "sha256"): result.get("weights_sha256", "-")[:16],
    }


def _spread(scores: Iterable[Mapping[str, Any] | None]) -> Cell:
    """Return the mean accuracy in percent, with its standard deviation, n and interval."""
    values = [score["accuracy"] for score in scores if score]
    if not values:
        return "-"
    sample = Sample.of(values)
    mean = f"{100 * sample.mean:.2f}"
    if not sample.std:
        return mean, f"n={sample.n}{', all equal' * (sample.n > 1)}"
    low, high = (100 * end for end in sample.interval())
    return mean, f"± {100 * sample.std:.2f}, n={sample.n}, {low:.2f} to {high:.2f}"


def curves(groups: Groups) -> list[Picture]:
    """Draw the accuracies and `CURVES` by epoch; a group has one line, of the same color in all pictures.

    The accuracies of one split have one range, so that raw and averaged weights can be compared by eye.
    """
    pictures: list[Picture] = []
    plain = [score for group in groups.values() for run in group for score in run.evaluations if not score["tta"]]
    for split, weights in dict.fromkeys((score["split"], score["weights"]) for score in plain):
        kind = split, weights, False
        scores = {
            name: [[s for s in run.evaluations if (s["split"], s["weights"], bool(s["tta"])) == kind] for run in group]
            for name, group in groups.items()
        }
        of_split = [100 * score["accuracy"] for score in plain if score["split"] == split]
        margin = 0.1 * (max(of_split) - min(of_split)) or 1.0
        limits = min(of_split) - margin, max(of_split) + margin
        title = f"{shorten(f'{split} accuracy, {weights} weights', 60)}, no TTA"
        draw = _dots if all(len(found) <= 1 for runs in scores.values() for found in runs) else _lines
        pictures += draw(_histories(scores, "accuracy", 100), title, "accuracy, %", limits)
    training = {name: [run.training for run in group] for name, group in groups.items()}
    for key, title, y_label, scale in CURVES:
        pictures += _lines(_histories(training, key, scale), title, y_label, max_points=MAX_POINTS)
    return pictures


History = Mapping[float, float]  # epoch -> value
Histories = Mapping[str, Sequence[History]]  # of the runs of each group


def _histories(records: Mapping[str, Sequence[Sequence[Mapping]]], key: str, scale: float) -> Histories:
    """Return the values of the records that have one."""
    return {
        name: [{each["epoch"]: scale * each[key] for each in run if each.get(key) is not None} for run in runs]
        for name, runs in records.items()
    }


def _lines(
    histories: Histories,
    title: str,
    y_label: str,
    limits: tuple[float, float] | None = None,
    max_points: float = math.inf,
) -> Iterator[Picture]:
    """Draw a curve per group, in pictures of up to `MAX_CURVES`; none if there is nothing to plot."""
    lines = {name: mean_curve(runs, max_points) for name, runs in histories.items()}
    parts = [list(lines)[start : start + MAX_CURVES] for start in range(0, len(lines), MAX_CURVES)]
    for number, part in enumerate(parts, 1):
        if not any(len(lines[name][0]) for name in part):
            continue
        numbered = title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        ends = [f"{name} {y[-1]:,.4g}" if len(y) else f"{name} none" for name in part for y in [lines[name][1]]]
        labeled = {name if len(lines[name][0]) else f"{name}: not recorded": lines[name] for name in part}
        png = figures.png(figures.line_plot(labeled, numbered, "epoch", y_label, limits))
        yield Picture(png, f"{numbered}, by epoch; at the end: {'; '.join(ends)}")


def _dots(histories: Histories, title: str, y_label: str, limits: tuple[float, float]) -> Iterator[Picture]:
    """Draw the values of runs that have one each: a dot per run, with n, mean and spread of each group."""
    labeled, texts = {}, []
    for name, runs in histories.items():
        if values := [value for history in runs for value in history.values()]:
            sample = Sample.of(values)
            spread = f" ± {sample.std:.2f}" if sample.n > 1 else ""
            texts.append(f"{name}: n={sample.n}, mean {sample.mean:.2f}{spread}")
            labeled[f"{textwrap.fill(name, 24)}\nn={sample.n}, mean {sample.mean:.2f}{spread}"] = values
    png = figures.png(figures.dot_plot(labeled, title, y_label, limits))
    yield Picture(png, f"{title}, a dot per run; {'; '.join(texts)}")


def mean_curve(histories: Sequence[History], max_points: float = math.inf) -> tuple[np.ndarray, ...]:
    """Return epochs [n] and mean [n] of several runs.

    Of more than one run also return the mean less and plus one standard deviation (of the sample) [n]. At the epochs of
    other runs, a run is interpolated between its own. If there are more than `max_points`, neighbors are averaged
    first.
    """
    epochs = np.array(sorted(set().union(*histories)))
    points = [np.array(sorted(history.items())).T for history in histories if history]  # epochs and values
    runs = [np.interp(epochs, x, y, left=np.nan, right=np.nan) for x, y in points]
    size = max(1, math.ceil(len(epochs) / max_points))
    chunks = [slice(start, start + size) for start in range(0, len(epochs), size)]
    found = [[run[chunk] for run in runs if np.isfinite(run[chunk]).any()] for chunk in chunks]
    samples = [Sample.of([float(np.nanmean(values)) for values in of_runs]) for of_runs in found]
    x = np.array([epochs[chunk].mean() for chunk in chunks])
    mean, std = (np.array([getattr(sample, name) for sample in samples]) for name in ("mean", "std"))
    return (x, mean, mean - std, mean + std) if len(histories) > 1 else (x, mean)


def _errors(groups: Groups, runs: Iterable[RunRecord]) -> Section:
    """Show each group's confusion matrix and the accuracy of each class, and each run's most confident mistakes."""
    found = [errors for name, group in groups.items() if (errors := group_errors(name, group))]
    matrices, tables = [picture for picture, _ in found], [table for _, table in found]
    diagrams = [diagram for name, group in groups.items() if (diagram := group_reliability(name, group))]
    note = "The interval of a class is Wilson's, over the choice of its images." if found else ""
    return Section("Errors", pictures=[[*matrices, *diagrams], mistakes(runs)], tables=tables, note=note)


def group_errors(name: str, group: Sequence[RunRecord]) -> tuple[Picture, Table] | None:
    """Draw the confusion matrix of a group and make the table of its classes; None if there is no matrix.

    The reported matrices of the finished runs are summed, or that of the run with the most steps is taken. Runs with
    another kind of score than the first one do not count.
    """
    runs, matrices, kind, title = _reported(name, group, "confusion")
    if not runs:
        return None
    counts = np.sum(matrices, 0)
    names = [shorten(str(each), 60) for each in runs[0].environment.get("class_names", range(len(counts)))]
    errors = np.where(np.eye(len(counts), dtype=bool), -1, counts)
    true, predicted = divmod(int(errors.argmax()), len(counts))
    alt = (
        f"confusion matrix of {title}: {np.trace(counts):,} of {counts.sum():,} right; most often, "
        f"{counts[true, predicted]:,} times, {names[true]} is taken for {names[predicted]}"
    )
    picture = Picture(figures.png(figures.confusion_matrix(counts, names, title)), alt)
    rows = [_class_row(*each, len(runs)) for each in zip(names, counts.sum(1), np.diag(counts), strict=True)]
    return picture, Table(rows, summary=f"{name}: accuracy of each class ({kind})")


def _reported(name: str, group: Sequence[RunRecord], key: str) -> tuple[list[RunRecord], list[Any], str, str]:
    """Return the runs of a group with reported scores of one kind that have `key`; its values, the kind, a title."""
    runs = [run for run in group if run.finished] or [max(group, key=lambda run: run.step)]
    found = [(run, score) for run in runs if (score := run.reported_score) and key in score]
    kind = score_name(found[0][1]) if found else ""
    found = [(run, score) for run, score in found if score_name(score) == kind]
    runs = [run for run, _ in found]
    title = shorten(f"{name}, {run_records.format_seeds(runs)}: {kind}", 160)
    return runs, [score[key] for _, score in found], kind, title


def group_reliability(name: str, group: Sequence[RunRecord]) -> Picture | None:
    """Draw the reliability diagram of the predictions of a group's runs; None if there are none."""
    runs, found, _, title = _reported(name, group, "reliability")
    if not runs:
        return None
    of_runs = np.array(found, float)  # [runs, 3, bins]
    ece = np.mean(np.abs(of_runs[:, 1] - of_runs[:, 2]).sum(1) / of_runs[:, 0].sum(1))  # that of all images is smaller
    bins = of_runs.sum(0)
    images, correct, confidence = bins[:, bins[0] > 0]
    x, shares = 100 * confidence / images, 100 * images / images.sum()
    curves = {"accuracy": (x, 100 * correct / images), "share of the images": (x, shares)}
    curves["accuracy = confidence"] = (0, 100), (0, 100)
    line = f"{'mean ' * (len(runs) > 1)}expected calibration error {ece:.4f}"
    plot = figures.line_plot(curves, f"{title}\n{line}", "mean confidence of a bin, %", "%", (0, 103))
    return Picture(figures.png(plot), f"reliability diagram of {title}: {line}")


def _class_row(name: str, seen: int, right: int, num_runs: int) -> Row:
    """Return a class's accuracy with its interval, for the number of images that one run classified."""
    row = {"class": name, "accuracy, %": "-", "95 % interval": "-", "images": f"{seen // num_runs:,}"}
    if seen:
        low, high = wilson_interval(right / seen, seen // num_runs)
        row |= {"accuracy, %": f"{100 * right / seen:.1f}", "95 % interval": f"{100 * low:.1f} to {100 * high:.1f}"}
    return row


def mistakes(runs: Iterable[RunRecord]) -> list[Picture]:
    """Return the runs' pictures of their most confident mistakes, without one that is missing or damaged."""
    pictures = []
    for run in runs:
        try:
            png = (run.directory / files.MISTAKES).read_bytes()
            with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
                image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
        alt = f"the most confident mistakes of {run.name}, each image with its predicted and its true class"
        pictures.append(Picture(png, alt, f"Most confident mistakes of {run.name}"))
    return pictures


def _towers(runs: Sequence[RunRecord]) -> Section:
    """Show means and last values of each tower, from the records with as many towers as the last record."""
    rows = []
    for run in runs:
        records = [record["towers"] for record in run.training if "towers" in record]
        number = len(records[-1]["loss"]) if records else len(run.towers)
        records = [record for record in records if len(record["loss"]) == number]
        for index in range(number):
            tower = run.towers[index] if len(run.towers) == number else {}
            name, device = tower.get("name", f"tower_{index}"), tower.get("device", "-")
            row: dict[Any, Cell] = {"run": run.name, "tower": name, "device": device}
            for heading, key in (("loss", "loss"), ("gradient norm", "gradient_norm"), ("cosine similarity", "cosine")):
                values = [value for record in records if (value := record[key][index]) is not None]
                row[heading, "mean"] = f"{statistics.fmean(values):.4g}" if values else "-"
                row[heading, "last"] = f"{values[-1]:.4g}" if values else "-"
            rows.append(row | {"records": str(len(records))})
    note = "Means are over the recorded steps; the cosine similarity is to the mean gradient of all towers."
    return Section("Towers", tables=[Table(rows, text_columns=3)], note=note)


def _times(runs: Sequence[RunRecord]) -> Section:
    phases = list(dict.fromkeys(phase for run in runs for phase in run.result.get("seconds", {})))
    rows: list[Row] = []
    for run in runs:
        if seconds := run.result.get("seconds"):
            total = math.fsum(seconds.values())
            cells = {key: (f"{value:,.1f}", f"{100 * value / (total or 1):.1f} %") for key, value in seconds.items()}
            rows.append({"run": run.name, **dict.fromkeys(phases, "-"), **cells, "total, s": f"{total:,.1f}"})
    return Section("Time", tables=[Table(rows)])


def _comparison(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Section:
    """Make a table of the values that differ between runs, and a folded one of those that all share."""
    differing: list[Row] = []
    common: list[Row] = []
    for key in dict.fromkeys(key for values in columns.values() for key in values):
        found = {name: as_text(values.get(key)) for name, values in columns.items()}
        if len(set(found.values())) > 1:
            differing.append({"": key} | found)
        else:
            common.append({"": key, "value": next(iter(found.values()))})
    summary = count(len(common), "value") + (" that all runs share" if len(columns) > 1 else "")
    return Section(title, tables=[Table(differing, 1 + len(columns)), Table(common, 2, summary=summary)])


def _listings(runs: Sequence[RunRecord]) -> Iterator[Table]:
    """Yield the folded tables of layers and variables, each distinct one once."""
    for key, noun, summed in LISTINGS:
        for owners, items in _distinct(runs, [run.environment.get(key, []) for run in runs]):
            rows = [
                {f: f"{v:,.0f}" if f in summed and v is not None else as_text(v) for f, v in item.items()}
                for item in items
            ]
            sums = ", ".join(f"{sum(item[field] or 0 for item in items):,.0f} {field}" for field in summed)
            text_columns = len(set(items[0]) - set(summed))
            yield Table(rows, text_columns, summary=f"{owners}{count(len(items), noun)}, {sums}")


def _distinct(runs: Sequence[RunRecord], values: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return each distinct value that is not empty, after the names of its runs, or after nothing if all have it."""
    owners: dict[str, list[str]] = {}
    for run, value in zip(runs, values, strict=True):
        owners.setdefault(json.dumps(value), []).append(run.name)
    named = [(", ".join(names) + ": " if len(names) < len(runs) else "", text) for text, names in owners.items()]
    return [(owner, value) for owner, text in named if (value := json.loads(text))]
