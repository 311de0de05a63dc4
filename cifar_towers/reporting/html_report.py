"""A report on one or several runs: a single HTML page with results, curves, errors, settings and commands.

Runs that differ in their seed alone are one group: a mean in the table, a curve with a band, one confusion matrix.
"""

import base64
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from cifar_towers import files
from cifar_towers.errors import RunError, count, error_text
from cifar_towers.evaluation.score import score_name
from cifar_towers.reporting import figures, run_records
from cifar_towers.reporting.phase_timer import training_seconds
from cifar_towers.reporting.run_records import Groups, RunRecord, as_text, flatten, format_number, format_rate, shorten
from cifar_towers.reporting.sample import Sample

Cell = str | tuple[str, str]  # a text, or a text and a smaller line below it
Row = Mapping[Any, Cell]  # content of a table by heading, which is a cell too

SHOWN_ELSEWHERE = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}
REPORTED: Cell = ("accuracy, %", "as reported")
CURVES = (  # key of a training record in metrics.jsonl, title, y axis, factor for its unit
    ("loss", "training loss (batch)", "loss", 1),
    ("accuracy", "training accuracy (batch)", "accuracy, %", 100),
    ("learning_rate", "learning rate", "learning rate", 1),
)
CURVES_NOTE = (
    "A line is the mean of a group's runs, and its band is one standard deviation to either side. Where some runs have "
    "ended, both are of the others. In a long run, a point of a training curve is the mean of several records."
)
MAX_POINTS = 120  # of a curve
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
    html = render(runs).encode(errors="replace").decode()  # a name may hold surrogates
    try:
        files.write_whole(out, html.encode("ascii", "xmlcharrefreplace"))  # readable in any locale
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error_text(error)}; name another with --out=FILE") from error
    return out


def render(runs: Sequence[RunRecord]) -> str:
    groups = run_records.group_by_recipe(runs)
    title = "; ".join(f"{name} ({run_records.format_seeds(group)})" for name, group in groups.items())
    properties = {run.name: flatten(run.config) | flatten(run.environment, SHOWN_ELSEWHERE) for run in runs}
    sections = [
        _results(groups),
        Section("Curves", CURVES_NOTE, [curves(groups)]),
        Section("Errors", pictures=[confusion_matrices(groups), mistakes(runs)]),
        _comparison(properties),
        Section("Command", commands=_distinct(runs, [shlex.join(run.environment.get("command", [])) for run in runs])),
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
    differences = [{"difference of mean accuracies": line} for line in run_records.compare_groups(groups)]
    note = (
        "A run reports the accuracy on the test set, of the averaged weights if it keeps an average, with the most "
        "test-time augmentation that it scored. The other columns show every score of the newest evaluation, with its "
        "mean cross entropy below. ± is the standard deviation over the n finished runs of a group. An interval of a "
        "difference that holds 0 does not tell the groups apart."
    )
    return Section("Results", tables=[Table(rows, highlighted=means), Table(differences)], note=note)


def _result_row(run: RunRecord, score_names: Iterable[str]) -> Row:
    result, last, reported = run.result, run.training[-1] if run.training else {}, run.reported_score
    seconds, state = result.get("seconds", {}), "" if run.finished else "unfinished"
    at = f", at step {run.scored_step:,}" if run.scored_step < run.step else ""
    if result.get("reached"):
        state = f"reached {100 * result['reached']:.2f} %"
    scores: dict[Any, Cell] = {("accuracy, %", name): "-" for name in score_names}
    for name, score in run.scores.items():
        scores["accuracy, %", name] = f"{100 * score['accuracy']:.2f}", f"loss {format_number(score['loss'], '.4f')}"
    return {
        "run": run.name,
        REPORTED: (f"{100 * reported['accuracy']:.2f}", score_name(reported) + at) if reported else "-",
        **scores,
        "images/s": format_rate(result.get("images_per_sec", last.get("images_per_sec"))),
        ("training, s", "with input and compilation"): f"{training_seconds(seconds):,.1f}" if seconds else "-",
        "steps": (f"{run.step:,}", state),
        "seed": as_text(run.config.get("seed")),
        "towers": as_text(len(run.towers) or None),
        "precision": run.precision,
        "skipped steps": format_number(result.get("skipped_steps", last.get("skipped_steps")), ",.0f"),
        ("weights", "sha256"): result.get("weights_sha256", "-")[:16],
    }


def _spread(scores: Iterable[Mapping[str, Any] | None]) -> Cell:
    """Return the mean accuracy in percent, with its standard deviation and n."""
    values = [100 * score["accuracy"] for score in scores if score]
    if not values:
        return "-"
    sample = Sample.of(values)
    return f"{sample.mean:.2f}", (f"± {sample.std:.2f}, " if sample.n > 1 else "") + f"n={sample.n}"


def curves(groups: Groups) -> list[Picture]:
    """Draw the accuracies without test-time augmentation, and `CURVES`, by epoch; a group is one line."""
    evaluations = {
        name: [[score for score in run.evaluations if not score["tta"]] for run in group]
        for name, group in groups.items()
    }
    kinds = dict.fromkeys((s["split"], s["weights"]) for runs in evaluations.values() for run in runs for s in run)
    pictures: list[Picture] = []
    for kind in kinds:
        scores = {
            name: [[score for score in run if (score["split"], score["weights"]) == kind] for run in runs]
            for name, runs in evaluations.items()
        }
        title = shorten(f"accuracy, {'/'.join(kind)}", 60)
        pictures += _lines(scores, "accuracy", title, "accuracy, %", 100)
    training = {name: [run.training for run in group] for name, group in groups.items()}
    for curve in CURVES:
        pictures += _lines(training, *curve)
    return pictures


def _lines(
    records: Mapping[str, Sequence[Sequence[Mapping]]], key: str, title: str, y_label: str, scale: float
) -> Iterator[Picture]:
    """Draw a curve per group with values of `key`, in pictures of up to `MAX_CURVES`."""
    lines = {}
    for name, runs in records.items():
        values = [{r["epoch"]: scale * r[key] for r in run if r.get(key) is not None} for run in runs]
        if any(values):
            lines[name] = mean_curve([history for history in values if history])
    for start in range(0, len(lines), MAX_CURVES):
        part = dict(list(lines.items())[start : start + MAX_CURVES])
        ends = "; ".join(f"{name} {y[-1]:,.4g}" for name, (_, y, *_) in part.items())
        png = figures.png(figures.line_plot(part, title, "epoch", y_label))
        yield Picture(png, f"{title}, by epoch; at the end: {ends}")


def mean_curve(histories: Sequence[Mapping[float, float]]) -> tuple[np.ndarray, ...]:
    """Return epochs [n] and mean [n] of runs {epoch: value}; of several, also mean -/+ standard deviation [n].

    At the epochs of other runs, a run is interpolated between its own. If there are more than `MAX_POINTS` epochs,
    neighbors are averaged first.
    """
    epochs = np.array(sorted(set().union(*histories)))
    chunks = np.array_split(np.arange(len(epochs)), min(len(epochs), MAX_POINTS))
    samples = []
    points = [np.array(sorted(history.items())).T for history in histories]
    runs = [np.interp(epochs, x, y, left=np.nan, right=np.nan) for x, y in points]
    for chunk in chunks:
        samples.append(Sample.of([float(np.nanmean(run[chunk])) for run in runs if np.isfinite(run[chunk]).any()]))
    x = np.array([epochs[chunk].mean() for chunk in chunks])
    mean, std, _ = np.array(samples).T
    return (x, mean, mean - std, mean + std) if len(histories) > 1 else (x, mean)


def confusion_matrices(groups: Groups) -> list[Picture]:
    """Draw the confusion matrix of each group: the sum over its finished runs with one kind of reported score."""
    pictures = []
    for name, group in groups.items():
        runs = [run for run in group if run.finished] or [max(group, key=lambda run: run.step)]
        scored = [(run, score) for run in runs if (score := run.reported_score) and "confusion" in score]
        if not scored:
            continue
        kind = score_name(scored[0][1])
        scored = [(run, score) for run, score in scored if score_name(score) == kind]
        counts = np.sum([score["confusion"] for _, score in scored], 0)
        names = scored[0][0].environment.get("class_names", range(len(counts)))
        title = shorten(f"{name}, {run_records.format_seeds([run for run, _ in scored])}: {kind}", 160)
        png = figures.png(figures.confusion_matrix(counts, [shorten(str(each), 60) for each in names], title))
        alt = f"confusion matrix of {title}: {np.trace(counts):,} of {counts.sum():,} right"
        pictures.append(Picture(png, alt))
    return pictures


def mistakes(runs: Iterable[RunRecord]) -> list[Picture]:
    """Return the pictures of the most confident mistakes of the runs that have one."""
    return [
        Picture(
            (run.directory / files.MISTAKES).read_bytes(),
            f"the most confident mistakes of {run.name}, each image with its predicted and its true class",
            f"Most confident mistakes of {run.name}",
        )
        for run in runs
        if (run.directory / files.MISTAKES).exists()
    ]


def _comparison(columns: Mapping[str, Mapping[str, Any]]) -> Section:
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
    tables = [Table(differing, 1 + len(columns)), Table(common, 2, summary=summary)]
    return Section("Settings and environment", tables=tables)


def _distinct(runs: Sequence[RunRecord], values: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return each distinct value that is not empty, after the names of its runs, or after nothing if all have it."""
    owners: dict[str, list[str]] = {}
    for run, value in zip(runs, values, strict=True):
        owners.setdefault(json.dumps(value), []).append(run.name)
    named = [(", ".join(names) + ": " if len(names) < len(runs) else "", text) for text, names in owners.items()]
    return [(owner, value) for owner, text in named if (value := json.loads(text))]
