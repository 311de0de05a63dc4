"""A report on one or several runs: a single HTML page with results, curves, confusion matrices, towers and settings.

Runs that differ in their seed alone are one group: a mean in the table, a curve with a band, one confusion matrix.
"""

import json
import math
import os
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import files
from cifar_towers.errors import RunError
from cifar_towers.reporting import html_page, run_records
from cifar_towers.reporting.html_page import Cell, Section, Table
from cifar_towers.reporting.phase_timer import TRAINING_PHASES
from cifar_towers.reporting.run_records import Groups, RunRecord, as_dict, as_list, as_number, as_text, format_number

SHOWN_ELSEWHERE = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}
LISTINGS = (("model", "layers", ("parameters", "flops")), ("variables", "variables", ("bytes",)))


def write(directories: Sequence[Path], out: Path) -> Path:
    """Writes the report on the runs in these directories to the file `out`, and returns it.

    Raises:
      UsageError: a directory is given twice, is missing, or holds no records of a run.
      RunError: the file cannot be written.
    """
    runs = run_records.read_runs(directories)
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
    """The HTML of the report."""
    from cifar_towers.reporting import report_figures  # takes a second or two: after all that can fail

    groups = run_records.group_by_recipe(runs)
    title = "; ".join(f"{name} ({run_records.format_seeds(group)})" for name, group in groups.items())
    sections = [
        _results(groups),
        Section("Curves", report_figures.describe_curves(groups), [report_figures.curves(groups)]),
        Section("Errors", pictures=[report_figures.confusion_matrices(groups), report_figures.mistakes(runs)]),
        _towers(runs),
        _seconds(runs),
        _comparison("Settings", {run.name: _flatten(run.config) for run in runs}),
        _comparison("Environment", {run.name: _flatten(run.environment, leave_out=SHOWN_ELSEWHERE) for run in runs}),
        _commands(runs),
        Section("Model and variables", tables=list(_listings(runs))),
    ]
    banners = [owners + banner for owners, banner in _distinct(runs, lambda run: run.banner)]
    return html_page.render(run_records.shorten(title, 200), sections, banners)


def _results(groups: Groups) -> Section:
    """A row per run, and one with the mean over the finished runs of each group of several."""
    scores = list(dict.fromkeys(score for group in groups.values() for run in group for score in run.scores))
    rows: list[Mapping[Cell, Cell]] = []
    means = []
    for name, group in groups.items():
        rows += [_result_row(run, scores) for run in group]
        if len(group) > 1 and any(run.finished for run in group):
            means.append(len(rows))
            rows.append({"run": f"{name}: mean"} | {_score_heading(score): _spread(group, score) for score in scores})
    headings = list(rows[0])
    cells = [[row.get(heading, "") for heading in headings] for row in rows]
    note = "Accuracies are of the newest evaluation, with its mean cross entropy below"
    note += "; ± is the standard deviation over the n finished runs." if means else "."
    return Section("Results", tables=[Table(headings, cells, highlighted=means)], note=note)


def _score_heading(score: str) -> Cell:
    split, _, kind = score.partition(", ")
    return f"{split} accuracy, %", kind


def _result_row(run: RunRecord, scores: Iterable[str]) -> dict[Cell, Cell]:
    result, last = run.result, run.training[-1] if run.training else {}
    training = _finite(as_dict(result.get("seconds")).get(phase) for phase in TRAINING_PHASES)
    state = "" if run.finished else "unfinished"
    if as_number(result.get("reached")) > 0:
        state = f"reached {format_number(result['reached'], '.2f', 100)} %"
    bad, rollbacks = result.get("bad_steps", last.get("bad_steps")), result.get("rollbacks")
    row: dict[Cell, Cell] = {"run": run.name}
    for name in scores:
        score = run.scores.get(name, {})
        loss = f"loss {format_number(score.get('loss'), '.4f')}" if score else ""
        row[_score_heading(name)] = format_number(score.get("accuracy"), ".2f", 100), loss
    return row | {
        ("training loss", "last record"): format_number(last.get("loss"), ".4f"),
        "images/s": format_number(result.get("images_per_sec", last.get("images_per_sec")), ",.0f"),
        ("training, s", "with input, compilation"): f"{math.fsum(training):,.1f}" if training else "-",
        "steps": (format_number(run.step, ",.0f"), state),
        "recipe": run.title,
        "seed": as_text(run.config.get("seed")),
        "towers": as_text(len(run.towers) or None),
        "precision": run.precision,
        "bad steps": (format_number(bad, ",.0f"), f"{as_text(rollbacks)} rollbacks" if rollbacks else ""),
        ("weights", "sha256"): as_text(result.get("weights_sha256"))[:16],
    }


def _spread(group: Iterable[RunRecord], score: str) -> Cell:
    values = _finite(run.scores.get(score, {}).get("accuracy") for run in group if run.finished)
    if not values:
        return "-"
    deviation = f"± {100 * statistics.stdev(values):.2f}, " if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}", f"{deviation}n={len(values)}"


def _towers(runs: Sequence[RunRecord]) -> Section:
    rows = [row for run in runs for row in _tower_rows(run)]
    headings: list[Cell] = ["run", "tower", "device"]
    headings += [(value, of) for value in ("loss", "gradient norm", "cosine similarity") for of in ("mean", "last")]
    note = "Means are over the recorded steps; the cosine similarity is to the mean gradient of all towers."
    table = Table([*headings, "records"], rows, text_columns=3)
    return Section("Towers", tables=[table] if rows else [], note=note)


def _tower_rows(run: RunRecord) -> Iterable[list[Cell]]:
    """A row per tower: the mean over the records of as many towers as the last one has, and the last value."""
    records = [record["towers"] for record in run.training if isinstance(record.get("towers"), dict)]
    number = len(as_list(records[-1].get("loss"))) if records else len(run.towers)
    records = [record for record in records if len(as_list(record.get("loss"))) == number]
    for index in range(number):
        tower = run.towers[index] if len(run.towers) == number else {}
        row: list[Cell] = [run.name, as_text(tower.get("name", f"tower_{index}")), as_text(tower.get("device"))]
        for key in ("loss", "gradient_norm", "cosine"):
            columns = [as_list(record.get(key)) for record in records]
            values = _finite(column[index] for column in columns if len(column) == number)
            row += [f"{statistics.fmean(values):.4g}", f"{values[-1]:.4g}"] if values else ["-", "-"]
        yield [*row, str(len(records))]


def _seconds(runs: Sequence[RunRecord]) -> Section:
    seconds = {run.name: phases for run in runs if (phases := as_dict(run.result.get("seconds")))}
    names = list(dict.fromkeys(phase for phases in seconds.values() for phase in phases))
    rows = []
    for run, phases in seconds.items():
        total, values = math.fsum(_finite(phases.values())), [phases.get(name) for name in names]
        percent = 100 / (total or 1)
        cells = [(format_number(value, ",.1f"), f"{format_number(value, '.1f', percent)} %") for value in values]
        rows.append([run, *cells, f"{total:,.1f}"])
    return Section("Time", tables=[Table(["run", *names, "total, s"], rows)] if names else [])


def _comparison(title: str, columns: Mapping[str, Mapping[str, str]]) -> Section:
    """A table of the values that differ between runs, and a folded one of those that all share."""
    keys = dict.fromkeys(key for values in columns.values() for key in values)
    rows = [[key, *(values.get(key, "-") for values in columns.values())] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    common = [row[:2] for row in rows if len(set(row[1:])) == 1]
    tables = [Table(["", *columns], differing, text_columns=1 + len(columns))] if differing else []
    summary = f"{len(common)} values" + (" that all runs share" if len(columns) > 1 else "")
    return Section(title, tables=[*tables, Table(["", "value"], common, 2, summary=summary)] if common else tables)


def _commands(runs: Sequence[RunRecord]) -> Section:
    commands = _distinct(runs, lambda run: shlex.join(map(as_text, as_list(run.environment.get("command")))))
    note = "A finished run is not repeated in its own directory: give another --train_dir."
    return Section("Command", commands=commands, note=note)


def _listings(runs: Sequence[RunRecord]) -> Iterable[Table]:
    for key, plural, summed in LISTINGS:
        for owners, items in _distinct(runs, lambda run, key=key: run_records.objects(run.environment.get(key))):
            fields = list(dict.fromkeys(field for item in items for field in item))
            rows = [
                [format_number(item.get(f), ",.0f") if f in summed else as_text(item.get(f)) for f in fields]
                for item in items
            ]
            totals = {field: np.nansum([as_number(item.get(field)) for item in items]) for field in summed}
            sums = ", ".join(f"{total:,.0f} {field}" for field, total in totals.items())
            text_columns = len(set(fields) - set(summed))
            yield Table(fields, rows, text_columns, summary=f"{owners}{len(items):,} {plural}, {sums}")


def _distinct(runs: Sequence[RunRecord], value: Callable[[RunRecord], Any]) -> list[tuple[str, Any]]:
    """Each distinct value that is not empty, after the names of its runs as `a, b: `; after nothing if all have it."""
    owners = run_records.group_by(runs, lambda run: json.dumps(value(run)))
    return [
        ("" if len(group) == len(runs) else ", ".join(run.name for run in group) + ": ", value(group[0]))
        for group in owners
        if value(group[0])
    ]


def _finite(values: Iterable) -> list[float]:
    return [value for value in map(as_number, values) if math.isfinite(value)]


def _flatten(values: Mapping, prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, str]:
    """Nested objects by their path, all values as text.

    >>> _flatten({"a": {"b": 1}, "c": "x"})
    {'a.b': '1', 'c': 'x'}
    """
    flat = {}
    for key, value in values.items():
        if key not in leave_out:
            flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: as_text(value)}
    return flat
