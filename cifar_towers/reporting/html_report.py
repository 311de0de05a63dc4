"""Runs for somebody without TensorBoard: one HTML page that holds all it shows and loads nothing.

Runs that differ in nothing but the seed are one group: a mean in the table, a curve with a band, one confusion matrix.
A file or a key that is missing leaves out what it would tell.
"""

import html
import json
import math
import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers.errors import RunError
from cifar_towers.files import atomic_io
from cifar_towers.reporting import markup, report_figures
from cifar_towers.reporting.phase_timer import TRAINING
from cifar_towers.reporting.run_records import (  # fmt: skip
    Groups,
    Run,
    as_figure,
    as_list,
    as_number,
    as_text,
    grouped,
    read_runs,
    seeds_of,
    shortened,
)

STEPPING = (*TRAINING, "compile")  # the activities that make steps


def write(directories: Sequence[Path], out: Path) -> Path:
    """Writes the page about the runs in these directories; where it is.

    Raises:
      UsageError: one of them is given twice, or holds no records of a run. RunError: the file cannot be written.
    """
    runs = read_runs(directories)
    if not os.path.isdir(out.parent):
        raise RunError(f"{out} cannot be written: there is no directory {out.parent}; name another with --out=FILE")
    if os.path.exists(out) and not os.path.isfile(out):
        raise RunError(f"{out} cannot be written: it is there, and no file; name one with --out=FILE")
    text = page(runs).encode("ascii", "xmlcharrefreplace").decode()  # whatever the locale
    try:
        atomic_io.write_whole(out, text)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}; name another place with --out=FILE") from None
    return out


def page(runs: Sequence[Run]) -> str:
    """The whole HTML page, its pictures and styles inside."""
    groups = grouped(runs)
    title = "; ".join(f"{name} ({seeds_of(group)})" for name, group in groups.items())
    sections = {
        "Result": _summary(groups),
        "Curves": report_figures.curves(groups),
        "Where it fails": markup.grid(report_figures.confusions(groups))
        + markup.grid(map(report_figures.mistakes, runs)),
        "Towers": _towers(runs),
        "Where the seconds went": _seconds(runs),
        "Settings": _settings(runs),
        "Where it ran": _environments(runs),
        "To run it again": _commands(runs),
        "Model and variables": _listings(runs),
    }
    body = "".join(f"<section>\n<h2>{name}</h2>\n{told}</section>\n" for name, told in sections.items() if told)
    return markup.document(shortened(title, 200), _banners(runs), body)


# The parts ------------------------------------------------------------------------------------------------------


def _banners(runs: Sequence[Run]) -> str:
    said = _shared(runs, lambda run: run.banner)
    return "".join(f'<p class="banner">{html.escape(of + banner)}</p>\n' for of, banner in said)


def _summary(groups: Groups) -> str:
    """A row a run, and for each group of several a row with the mean over those that are finished."""
    which = list(dict.fromkeys(which for group in groups.values() for run in group for which in run.scores))
    accuracies = [(f"{split} accuracy, %", rest) for split, _, rest in (name.partition(", ") for name in which)]
    headings = ["run", *accuracies, *FIGURES]
    rows, means = [], []
    for name, group in groups.items():
        rows += [_summary_row(run, which) for run in group]
        if len(group) > 1 and any(run.finished for run in group):
            means.append(len(rows))
            rows.append([f"{name}: mean", *(_spread(group, key) for key in which), *[""] * len(FIGURES)])
    note = "Accuracies are of the newest evaluation, the loss under each is its mean cross entropy"
    note += "; ± is the standard deviation over the n runs that are finished." if means else "."
    return markup.table(headings, rows, marked=means) + f"<p>{note}</p>\n"


FIGURES = (
    ("training loss", "last record"), "images/s", ("training, s", "with input, compilation"), "steps", "recipe", "seed",
    "towers", "precision", "bad steps", ("weights", "sha256"),
)  # fmt: skip


def _summary_row(run: Run, which: Iterable[str]) -> list:
    result, last = run.result if run.finished else {}, run.training[-1] if run.training else {}
    scores = [run.scores.get(name, {}) for name in which]
    seconds = result.get("seconds") if isinstance(result.get("seconds"), dict) else {}
    steps = [value for key in STEPPING if math.isfinite(value := as_number(seconds.get(key)))]
    state = "" if run.finished else "unfinished"
    if as_number(result.get("reached")) > 0:
        state = f"reached {as_figure(result['reached'], '.2f', 100)} %"
    bad, rollbacks = result.get("bad_steps", last.get("bad_steps")), result.get("rollbacks")
    return [
        run.name,
        *(
            (as_figure(s.get("accuracy"), ".2f", 100), f"loss {as_figure(s.get('loss'), '.4f')}" if s else "")
            for s in scores
        ),
        as_figure(last.get("loss"), ".4f"),
        as_figure(result.get("images_per_sec", last.get("images_per_sec")), ",.0f"),
        as_figure(math.fsum(steps), ",.1f") if steps else "-",
        (as_figure(run.step, ",.0f"), state),
        run.title,
        as_text(run.config.get("seed")),
        as_text(len(run.towers) or None),
        run.precision,
        (as_figure(bad, ",.0f"), f"{as_text(rollbacks)} rollbacks" if rollbacks else ""),
        as_text(result.get("weights_sha256"))[:16],
    ]


def _spread(group: Iterable[Run], which: str) -> tuple[str, str]:
    """Mean in percent; standard deviation and n."""
    found = [as_number(run.scores.get(which, {}).get("accuracy")) for run in group if run.finished]
    found = [100 * value for value in found if math.isfinite(value)]
    if not found:
        return "-", ""
    spread = f"± {statistics.stdev(found):.2f}, " if len(found) > 1 else ""
    return f"{statistics.fmean(found):.2f}", f"{spread}n={len(found)}"


def _towers(runs: Sequence[Run]) -> str:
    """A row a tower: mean over the records that tell of it, and the last of them."""
    rows = [row for run in runs for row in _tower_rows(run)]
    headings = ["run", "tower", "device"]
    headings += [(what, when) for what in ("loss", "gradient norm", "cosine") for when in ("mean", "last")]
    note = "Means are over the recorded steps; the cosine is of the tower's gradient to the mean of all towers'."
    return markup.table([*headings, "records"], rows, left=3) + f"<p>{note}</p>\n" if rows else ""


def _tower_rows(run: Run) -> Iterable[list]:
    told = [record["towers"] for record in run.training if isinstance(record.get("towers"), dict)]
    number = len(as_list(told[-1].get("loss"))) if told else len(run.towers)
    told = [of for of in told if len(as_list(of.get("loss"))) == number]  # none of when there were more, or fewer
    for index in range(number):
        tower = run.towers[index] if len(run.towers) == number else {}
        row = [run.name, as_text(tower.get("name", f"tower_{index}")), as_text(tower.get("device"))]
        for key in ("loss", "gradient_norm", "cosine"):
            values = [as_number(as_list(of.get(key))[index]) for of in told if len(as_list(of.get(key))) == number]
            values = [value for value in values if math.isfinite(value)]
            row += [as_figure(statistics.fmean(values), ".4g"), as_figure(values[-1], ".4g")] if values else ["-", "-"]
        yield [*row, str(len(told))]


def _seconds(runs: Sequence[Run]) -> str:
    spent = {run.name: run.result.get("seconds") for run in runs if run.finished}
    spent = {name: of for name, of in spent.items() if isinstance(of, dict)}
    activities = list(dict.fromkeys(activity for of in spent.values() for activity in of))
    rows = []
    for name, of in spent.items():
        total = math.fsum(value for value in map(as_number, of.values()) if math.isfinite(value))
        cells = [
            (as_figure(of.get(key), ",.1f"), f"{as_figure(of.get(key), '.1f', 100 / (total or 1))} %")
            for key in activities
        ]
        rows.append([name, *cells, f"{total:,.1f}"])
    return markup.table(["run", *activities, "total, s"], rows) if activities else ""


def _settings(runs: Sequence[Run]) -> str:
    """What differs between the runs in a table, the rest folded away."""
    odd, common = _side_by_side({run.name: run.config for run in runs})
    told = f"{len(common)} settings" + (" that all runs share" if len(runs) > 1 else "")
    return odd + (markup.folded(told, markup.table(["", "value"], common, left=2)) if common else "")


def _environments(runs: Sequence[Run]) -> str:
    apart = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}  # shown elsewhere
    told = {run.name: {name: of for name, of in run.environment.items() if name not in apart} for run in runs}
    odd, common = _side_by_side(told)
    return odd + (markup.table(["", "all runs" if odd else ""], common, left=2) if common else "")


def _side_by_side(columns: Mapping[str, Mapping]) -> tuple[str, list]:
    """A table of what differs, if anything does, and the rows (name, value) of what does not."""
    flat = {name: _flat(of) for name, of in columns.items()}
    keys = list(dict.fromkeys(key for of in flat.values() for key in of))
    rows = {key: [of.get(key, "-") for of in flat.values()] for key in keys}
    odd = [[key, *values] for key, values in rows.items() if len(set(values)) > 1]
    common = [[key, values[0]] for key, values in rows.items() if len(set(values)) == 1]
    return markup.table(["", *flat], odd, left=1 + len(flat)) if odd else "", common


def _commands(runs: Sequence[Run]) -> str:
    """The command of each, once."""
    lines = []
    for of, command in _shared(runs, lambda run: as_list(run.environment.get("command"))):
        words = [as_text(word) for word in command]
        lines.append(f"{f'<p>{html.escape(of)}</p>' if of else ''}<pre>{html.escape(shlex.join(words))}</pre>\n")
    again = "<p>Where a finished run stands, nothing is repeated: name another <code>--train_dir</code>.</p>\n"
    return "".join(lines) + again if lines else ""


def _listings(runs: Sequence[Run]) -> str:
    """Layers and variables, folded away, each list once."""
    told = []
    for key, what, summed in (("model", "layers", ("parameters", "flops")), ("variables", "variables", ("bytes",))):

        def items_of(run, key=key):
            return [item for item in as_list(run.environment.get(key)) if isinstance(item, dict)]

        for of, items in _shared(runs, items_of):
            fields = list(dict.fromkeys(field for item in items for field in item))
            rows = [
                [
                    as_figure(item.get(field), ",.0f") if field in summed else as_text(item.get(field))
                    for field in fields
                ]
                for item in items
            ]
            totals = {field: np.nansum([as_number(item.get(field)) for item in items]) for field in summed}
            sums = ", ".join(f"{total:,.0f} {field}" for field, total in totals.items())
            words = len([field for field in fields if field not in summed])
            told.append(markup.folded(f"{of}{len(items):,} {what}, {sums}", markup.table(fields, rows, left=words)))
    return "".join(told)


def _shared(runs: Sequence[Run], value: Callable[[Run], Any]) -> list[tuple[str, Any]]:
    """(whose it is, as `a, b: `, or nothing where it is all runs', the value), each value that is not empty once."""
    owners: dict[str, list[Run]] = {}
    for run in runs:
        owners.setdefault(json.dumps(value(run)), []).append(run)
    found = [
        ("" if len(of) == len(runs) else ", ".join(run.name for run in of) + ": ", value(of[0]))
        for of in owners.values()
    ]
    return [(of, told) for of, told in found if told]


def _flat(value: Mapping, prefix: str = "") -> dict[str, str]:
    """Nested objects by their path, all values as text."""
    found = {}
    for key, of in value.items():
        found |= _flat(of, f"{prefix}{key}.") if isinstance(of, dict) else {prefix + key: as_text(of)}
    return found
