"""A report on one or several runs: a single HTML page with results, curves, confusion matrices, towers and settings.

Runs that differ in their seed alone are one group: a mean in the table, a curve with a band, one confusion matrix.
"""

import functools
import io
import json
import math
import os
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cifar_towers import files
from cifar_towers.errors import RunError
from cifar_towers.evaluation.score import wilson_interval
from cifar_towers.reporting import figures, html_page, run_records
from cifar_towers.reporting.html_page import Cell, Picture, Section, Table
from cifar_towers.reporting.phase_timer import TRAINING_PHASES
from cifar_towers.reporting.run_records import Groups, RunRecord, as_text, format_number, shorten
from cifar_towers.reporting.sample import Sample

SHOWN_ELSEWHERE = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}
LISTINGS = (("model", "layers", ("parameters", "flops")), ("variables", "variables", ("bytes",)))
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
MAX_POINTS = 120  # of a curve of training records
MAX_CURVES = 8  # that can be distinguished in one picture


def write(runs: Sequence[RunRecord], out: Path) -> Path:
    """Write the report on these runs to the file `out`, and return its path.

    Raises:
      RunError: the file cannot be written.
    """
    if not os.path.isdir(out.parent):
        raise RunError(f"{out} cannot be written: there is no directory {out.parent}; name another with --out=FILE")
    if os.path.exists(out) and not os.path.isfile(out):
        raise RunError(f"{out} cannot be written: it exists and is not a file; name one with --out=FILE")
    html = render(runs).encode(errors="replace").decode()  # a name may hold surrogates
    html = html.encode("ascii", "xmlcharrefreplace").decode()  # readable in any locale
    try:
        files.write_whole(out, html)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}; name another place with --out=FILE") from None
    return out


def render(runs: Sequence[RunRecord]) -> str:
    """Return the HTML of the report."""
    groups = run_records.group_by_recipe(runs)
    title = "; ".join(f"{name} ({run_records.format_seeds(group)})" for name, group in groups.items())
    sections = [
        _results(groups),
        Section("Curves", describe_curves(groups), [curves(groups)]),
        _errors(groups, runs),
        _towers(runs),
        _seconds(runs),
        _comparison("Settings", {run.name: _flatten(run.config) for run in runs}),
        _comparison("Environment", {run.name: _flatten(run.environment, leave_out=SHOWN_ELSEWHERE) for run in runs}),
        _commands(runs),
        Section("Model and variables", tables=list(_listings(runs))),
    ]
    banners = [owners + banner for owners, banner in _distinct(runs, lambda run: run.banner)]
    return html_page.render(shorten(title, 200), sections, banners)


def _results(groups: Groups) -> Section:
    """Make a row per run, a row with the mean over the finished runs of each group of several, and the differences."""
    scores = list(dict.fromkeys(score for group in groups.values() for run in group for score in run.scores))
    rows: list[Mapping[Cell, Cell]] = []
    means = []
    for name, group in groups.items():
        rows += [_result_row(run, scores) for run in group]
        finished = [run for run in group if run.finished]
        if len(group) > 1 and finished:
            means.append(len(rows))
            spreads = {_score_heading(score): _spread([run.scores.get(score) for run in finished]) for score in scores}
            rows.append({"run": f"{name}: mean", REPORTED: _spread([run.reported_score for run in finished])} | spreads)
    headings = list(rows[0])
    tables = [Table(headings, [[row.get(heading, "") for heading in headings] for row in rows], highlighted=means)]
    note = (
        "A run reports the accuracy on the test set, of the averaged weights if it keeps an average, with the most "
        "test-time augmentation that it scored. The other columns show every score of the newest evaluation, with its "
        "mean cross entropy below."
    )
    if means:
        note += " ± is the standard deviation over the n finished runs, with the 95 % interval of the mean."
    if differences := run_records.compare_groups(groups):
        tables.append(Table(["group", "less the group", "difference of the reported accuracies"], differences, 3))
        note += " The interval of a difference is Welch's: one that holds 0 does not tell the groups apart."
    return Section("Results", tables=tables, note=note)


def _score_heading(score: str) -> Cell:
    split, _, kind = score.partition(", ")
    return f"{split} accuracy, %", kind


def _result_row(run: RunRecord, scores: Iterable[str]) -> dict[Cell, Cell]:
    result, last, reported = run.result, run.training[-1] if run.training else {}, run.reported_score
    seconds = result.get("seconds", {})
    training = math.fsum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
    state = "" if run.finished else "unfinished"
    if result.get("reached"):
        state = f"reached {100 * result['reached']:.2f} %"
    skipped, rollbacks = result.get("skipped_steps", last.get("skipped_steps")), result.get("rollbacks")
    row: dict[Cell, Cell] = {"run": run.name, REPORTED: "-"}
    if reported:
        row[REPORTED] = f"{100 * reported['accuracy']:.2f}", run_records.score_name(reported)
    for name in scores:
        score = run.scores.get(name)
        cell = (f"{100 * score['accuracy']:.2f}", f"loss {format_number(score['loss'], '.4f')}") if score else "-"
        row[_score_heading(name)] = cell
    return row | {
        ("training loss", "last record"): format_number(last.get("loss"), ".4f"),
        "images/s": format_number(result.get("images_per_sec", last.get("images_per_sec")), ",.0f"),
        ("training, s", "with input, compilation"): f"{training:,.1f}" if seconds else "-",
        "steps": (f"{run.step:,}", state),
        "recipe": run.title,
        "seed": as_text(run.config.get("seed")),
        "towers": as_text(len(run.towers) or None),
        "precision": run.precision,
        "skipped steps": (format_number(skipped, ",.0f"), f"{rollbacks} rollbacks" if rollbacks else ""),
        ("weights", "sha256"): result.get("weights_sha256", "-")[:16],
    }


def _spread(scores: Iterable[Mapping[str, Any] | None]) -> Cell:
    """Return the mean accuracy in percent, with its standard deviation, n and interval."""
    values = [score["accuracy"] for score in scores if score]
    if not values:
        return "-"
    sample = Sample.of(values)
    mean, interval = f"{100 * sample.mean:.2f}", sample.interval()
    if sample.std is None or interval is None:
        return mean, "n=1"
    return mean, f"± {100 * sample.std:.2f}, n={sample.n}, {100 * interval[0]:.2f} to {100 * interval[1]:.2f}"


def curves(groups: Groups) -> list[Picture]:
    """Draw the accuracies and `CURVES` by epoch; a group has one line, of the same color in all pictures.

    The accuracies of one split have one range, so that raw and averaged weights can be compared by eye.
    """
    pictures: list[Picture] = []
    runs = [run for group in groups.values() for run in group]
    plain = [score for run in runs for score in run.evaluations if not score["tta"]]
    for kind in dict.fromkeys(run_records.score_kind(score) for score in plain):
        split = kind.partition(",")[0]
        shown = {
            name: [
                {score["epoch"]: 100 * score["accuracy"] for score in run.evaluations if _is_plain(score, kind)}
                for run in group
            ]
            for name, group in groups.items()
        }
        of_split = [100 * score["accuracy"] for score in plain if score["split"] == split]
        margin = 0.1 * (max(of_split) - min(of_split)) or 1.0
        limits = min(of_split) - margin, max(of_split) + margin
        title = f"{shorten(kind.replace(',', ' accuracy,', 1), 60)}, no TTA"
        if all(len(history) <= 1 for histories in shown.values() for history in histories):
            pictures.append(_plot_single_values(shown, title, "accuracy, %", limits))
        else:
            pictures += _plot(shown, title, "accuracy, %", limits=limits)
    for key, title, y_label, scale in CURVES:
        histories = {name: [_history(run.training, key, scale) for run in group] for name, group in groups.items()}
        pictures += _plot(histories, title, y_label, MAX_POINTS)
    return pictures


def describe_curves(groups: Groups) -> str:
    """Return the meaning of lines, bands and points of the curves."""
    runs = [run for group in groups.values() for run in group]
    notes = []
    if len(runs) > len(groups):
        notes.append("A line is the mean of a group's runs, the band one standard deviation to either side.")
        if not all(run.finished for run in runs):
            notes.append("After the end of an unfinished run both are of the others.")
    if any(len(run.training) > MAX_POINTS for run in runs):
        notes.append("A point of a long run's training is the mean of several records.")
    return " ".join(notes)


History = Mapping[float, float]  # epoch -> value


def _is_plain(score: Mapping[str, Any], kind: str) -> bool:
    return run_records.score_kind(score) == kind and not score["tta"]


def _history(records: Iterable[Mapping[str, Any]], key: str, scale: float) -> History:
    """Return {epoch: value} of the records that have the value."""
    return {record["epoch"]: scale * record[key] for record in records if record.get(key) is not None}


def _plot(
    histories: Mapping[str, Sequence[History]],
    title: str,
    y_label: str,
    max_points: int = 0,
    limits: tuple[float, float] | None = None,
) -> Iterator[Picture]:
    """Draw a curve per group, in pictures of up to `MAX_CURVES`; none if there is nothing to plot."""
    lines = {name: mean_curve(runs, max_points) for name, runs in histories.items()}
    names = list(lines)
    parts = [names[start : start + MAX_CURVES] for start in range(0, len(names), MAX_CURVES)]
    for number, part in enumerate(parts, 1):
        if not any(len(lines[name][0]) for name in part):
            continue
        numbered = title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        ends = [f"{name} {y[-1]:,.4g}" if len(y) else f"{name} none" for name in part for y in [lines[name][1]]]
        labeled = {name if len(lines[name][0]) else f"{name}: not recorded": lines[name] for name in part}
        png = figures.png(figures.line_plot(labeled, numbered, "epoch", y_label, limits))
        yield Picture(png, f"{numbered}, by epoch; at the end: {'; '.join(ends)}")


def _plot_single_values(
    histories: Mapping[str, Sequence[History]], title: str, y_label: str, limits: tuple[float, float]
) -> Picture:
    """Draw the values of runs that have one each: a dot per run, with n, mean and spread of each group."""
    values = {name: [value for history in runs for value in history.values()] for name, runs in histories.items()}
    values = {name: found for name, found in values.items() if found}
    samples = {name: Sample.of(found) for name, found in values.items()}
    spread = {name: f" ± {sample.std:.2f}" if sample.std is not None else "" for name, sample in samples.items()}
    texts = {name: f"n={sample.n}, mean {sample.mean:.2f}{spread[name]}" for name, sample in samples.items()}
    labeled = {f"{shorten(name, 24)}\n{texts[name]}": found for name, found in values.items()}
    alt = f"{title}, a dot per run; {'; '.join(f'{name}: {text}' for name, text in texts.items())}"
    return Picture(figures.png(figures.dot_plot(labeled, title, y_label, limits)), alt)


def mean_curve(histories: Sequence[History], max_points: int = 0) -> tuple[np.ndarray, ...]:
    """Return epochs [n] and mean [n] of several runs.

    Of more than one run also return the mean less and plus one standard deviation (of the sample) [n]. If there are
    more than `max_points`, and that is not 0, neighbors are averaged first.
    """
    epochs = sorted(set().union(*histories))
    size = math.ceil(len(epochs) / max_points) or 1 if max_points else 1
    chunks = [epochs[start : start + size] for start in range(0, len(epochs), size)]
    means = [
        [statistics.fmean(values) for history in histories if (values := [history[e] for e in chunk if e in history])]
        for chunk in chunks
    ]
    samples = [Sample.of(values) for values in means]
    x, mean = np.array([statistics.fmean(chunk) for chunk in chunks]), np.array([sample.mean for sample in samples])
    std = np.array([sample.std or 0.0 for sample in samples])
    return (x, mean, mean - std, mean + std) if len(histories) > 1 else (x, mean)


def _errors(groups: Groups, runs: Iterable[RunRecord]) -> Section:
    """Show each group's confusion matrix and the accuracy of each class, and each run's most confident mistakes."""
    summed = {name: found for name, group in groups.items() if (found := sum_confusion(group))}
    tables = [_class_table(name, *found) for name, found in summed.items()]
    note = "The interval of a class is Wilson's, over the choice of its images." if tables else ""
    return Section("Errors", pictures=[confusion_matrices(summed), mistakes(runs)], tables=tables, note=note)


# Some runs of a group, the name of their score, its confusion matrix [C, C] summed over them, class names.
Confusion = tuple[Sequence[RunRecord], str, np.ndarray, Sequence[str]]


def sum_confusion(group: Sequence[RunRecord]) -> Confusion | None:
    """Sum the reported confusion matrices over a group's finished runs, or take that of the run with the most steps.

    Runs with another kind of score than the first one do not count. None if there is no matrix.
    """
    runs = [run for run in group if run.finished] or [max(group, key=lambda run: run.step)]
    found = [(run, score) for run in runs if (score := run.reported_score) and "confusion" in score]
    if not found:
        return None
    kind = run_records.score_name(found[0][1])
    found = [(run, score) for run, score in found if run_records.score_name(score) == kind]
    counts = np.sum([score["confusion"] for _, score in found], 0)
    names = [shorten(name, 20) for name in found[0][0].environment.get("class_names", [])]
    return [run for run, _ in found], kind, counts, names or [str(index) for index in range(len(counts))]


def confusion_matrices(summed: Mapping[str, Confusion]) -> list[Picture]:
    """Draw the confusion matrix of each group."""
    pictures = []
    for name, (runs, kind, counts, names) in summed.items():
        title = shorten(f"{name}, {run_records.format_seeds(runs)}: {kind}", 160)
        errors = np.where(np.eye(len(counts), dtype=bool), -1, counts)
        true, predicted = divmod(int(errors.argmax()), len(counts))
        alt = (
            f"confusion matrix of {title}: {np.trace(counts):,} of {counts.sum():,} right; most often, "
            f"{counts[true, predicted]:,} times, {names[true]} is taken for {names[predicted]}"
        )
        pictures.append(Picture(figures.png(figures.confusion_matrix(counts, names, title)), alt))
    return pictures


def _class_table(name: str, runs: Sequence[RunRecord], kind: str, counts: np.ndarray, names: Sequence[str]) -> Table:
    """Make the table of each class's accuracy with its interval, for the number of images that one run classified."""
    rows = []
    for index, class_name in enumerate(names):
        seen = int(counts[index].sum())
        images, accuracy = seen // len(runs), counts[index, index] / seen if seen else 0.0
        low, high = wilson_interval(accuracy, images) if images else (0.0, 1.0)
        rows.append([class_name, f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{images:,}"])
    headings = ["class", "accuracy, %", "95 % interval", "images"]
    return Table(headings, rows, summary=f"{name}: accuracy of each class ({kind})")


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
    rows = [row for run in runs for row in _tower_rows(run)]
    headings: list[Cell] = ["run", "tower", "device"]
    headings += [(value, of) for value in ("loss", "gradient norm", "cosine similarity") for of in ("mean", "last")]
    note = "Means are over the recorded steps; the cosine similarity is to the mean gradient of all towers."
    table = Table([*headings, "records"], rows, text_columns=3)
    return Section("Towers", tables=[table] if rows else [], note=note)


def _tower_rows(run: RunRecord) -> Iterator[list[Cell]]:
    """Yield a row per tower: the mean over the records of as many towers as the last one has, and the last value."""
    records = [record["towers"] for record in run.training if "towers" in record]
    number = len(records[-1]["loss"]) if records else len(run.towers)
    records = [record for record in records if len(record["loss"]) == number]
    for index in range(number):
        tower = run.towers[index] if len(run.towers) == number else {}
        row: list[Cell] = [run.name, tower.get("name", f"tower_{index}"), tower.get("device", "-")]
        for key in ("loss", "gradient_norm", "cosine"):
            values = [value for record in records if (value := record[key][index]) is not None]
            row += [f"{statistics.fmean(values):.4g}", f"{values[-1]:.4g}"] if values else ["-", "-"]
        yield [*row, str(len(records))]


def _seconds(runs: Sequence[RunRecord]) -> Section:
    seconds = {run.name: run.result["seconds"] for run in runs if run.result.get("seconds")}
    names = list(dict.fromkeys(phase for phases in seconds.values() for phase in phases))
    rows: list[list[Cell]] = []
    for run, phases in seconds.items():
        total = math.fsum(phases.values())
        percent = 100 / (total or 1)
        values = [phases.get(name) for name in names]
        cells = [(format_number(value, ",.1f"), f"{format_number(value, '.1f', percent)} %") for value in values]
        rows.append([run, *cells, f"{total:,.1f}"])
    return Section("Time", tables=[Table(["run", *names, "total, s"], rows)] if names else [])


def _comparison(title: str, columns: Mapping[str, Mapping[str, str]]) -> Section:
    """Make a table of the values that differ between runs, and a folded one of those that all share."""
    keys = dict.fromkeys(key for values in columns.values() for key in values)
    rows = [[key, *(values.get(key, "-") for values in columns.values())] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    common = [row[:2] for row in rows if len(set(row[1:])) == 1]
    tables = [Table(["", *columns], differing, text_columns=1 + len(columns))] if differing else []
    summary = f"{len(common)} values" + (" that all runs share" if len(columns) > 1 else "")
    return Section(title, tables=[*tables, Table(["", "value"], common, 2, summary=summary)] if common else tables)


def _commands(runs: Sequence[RunRecord]) -> Section:
    commands = _distinct(runs, lambda run: shlex.join(run.environment.get("command", [])))
    note = "A finished run is not repeated in its own directory: give another --train_dir."
    return Section("Command", commands=commands, note=note)


def _listings(runs: Sequence[RunRecord]) -> Iterator[Table]:
    """Yield the folded tables of layers and variables, each distinct one once."""
    for key, plural, summed in LISTINGS:
        for owners, items in _distinct(runs, functools.partial(_listed, key)):
            fields = list(items[0])
            rows = [[f"{item[f]:,.0f}" if f in summed else as_text(item[f]) for f in fields] for item in items]
            sums = ", ".join(f"{sum(item[field] for item in items):,.0f} {field}" for field in summed)
            text_columns = len(set(fields) - set(summed))
            yield Table(fields, rows, text_columns, summary=f"{owners}{len(items):,} {plural}, {sums}")


def _listed(key: str, run: RunRecord) -> list[dict[str, Any]]:
    return run.environment.get(key, [])


def _distinct(runs: Sequence[RunRecord], value: Callable[[RunRecord], Any]) -> list[tuple[str, Any]]:
    """Return each distinct value that is not empty, after the names of its runs, or after nothing if all have it."""
    owners = run_records.group_by(runs, lambda run: json.dumps(value(run)))
    return [
        ("" if len(group) == len(runs) else ", ".join(run.name for run in group) + ": ", value(group[0]))
        for group in owners
        if value(group[0])
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, str]:
    """Return nested objects by their path, all values as text.

    >>> _flatten({"a": {"b": 1}, "c": "x"})
    {'a.b': '1', 'c': 'x'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if key not in leave_out:
            flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: as_text(value)}
    return flat
