"""Runs for somebody without TensorBoard: one HTML page that holds all it shows and loads nothing.

Runs that differ in nothing but the seed are one group: a mean in the table, a curve with a band, one confusion matrix.
A file or a key that is missing leaves out what it would tell.
"""

import base64
import dataclasses
import html
import io
import itertools
import json
import math
import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers.errors import RunError, UsageError
from cifar_towers.reporting import records
from cifar_towers.reporting.clock import TRAINING

INCIDENTAL = {"seed", "seeds", "train_dir", "data_dir", "fresh", "dataset"}  # what may differ between runs of a group
SYNTHETIC = "SYNTHETIC DATA, NOT CIFAR-10: these accuracies say nothing about CIFAR-10."
CURVES = (  # key of the training records, title, axis, unit of the axis in units of the record
    ("loss", "training loss, of the batch", "loss", 1),
    ("accuracy", "training accuracy, of the batch", "accuracy, %", 100),
    ("learning_rate", "learning rate", "learning rate", 1),
    ("gradient_norm", "gradient norm", "norm", 1),
    ("images_per_sec", "images a second", "images/s", 1),
    ("input_wait", "time spent waiting for input", "of the time, %", 100),
    ("gradient_noise_scale", "gradient noise scale", "examples", 1),
)
MEAN, WORDS = ' class="mean"', ' class="words"'
STEPPING = (*TRAINING, "compile")  # the activities that make steps
CLASSES = 10
POINTS = 120  # of a curve, at most
TOGETHER = 8  # curves that a picture tells apart
Groups = Mapping[str, Sequence["Run"]]


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
        records.write_whole(out, text)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}; name another place with --out=FILE") from None
    return out


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
        return _number(self.result.get("step")) >= self.step

    @property
    def title(self) -> str:
        """The recipe's name, or else the model's or the directory's."""
        return _text(self.config.get("recipe") or self.config.get("model") or self.name)

    @property
    def precision(self) -> str:
        """What it computed in, which `auto` does not tell."""
        return _text(self.environment.get("precision", self.config.get("precision")))

    @property
    def towers(self) -> list[dict]:
        """Name and device of each."""
        return [tower for tower in _list(self.environment.get("towers")) if isinstance(tower, dict)]

    @property
    def banner(self) -> str:
        """What must be said of data that is not CIFAR-10, whether it was asked for or stood in."""
        asked = "synthetic" in (self.config.get("dataset"), self.result.get("dataset"))
        return _text(self.environment.get("synthetic_data") or (SYNTHETIC if asked else ""))

    @property
    def recipe(self) -> dict:
        """All that runs of one group have in common: settings, and what `auto` came to."""
        settled = {name: value for name, value in self.config.items() if name not in INCIDENTAL}
        digests = self.environment.get("data_sha256")
        digest = digests.get("train") if isinstance(digests, dict) else None
        data = "synthetic" if self.banner else digest or self.config.get("dataset")
        towers = len(self.towers) or self.config.get("num_gpus")
        return settled | {"precision": self.precision, "num_gpus": towers, "data": _text(data)[:12]}

    @property
    def scores(self) -> dict[str, dict]:
        """The records of the newest evaluation by what they are of, as `test, raw weights, TTA 2`."""
        told = _list(self.result.get("evaluations")) if self.finished else []
        step = self.result["step"] if self.finished else max((record["step"] for record in self.evaluations), default=0)
        told = [*told, *(record for record in self.evaluations if record["step"] == step)]
        return {_which(score): score for score in told if isinstance(score, dict)}

    def plain(self, kind: str) -> list[dict]:
        """The records of all evaluations of this kind, as `test, raw weights`, without TTA."""
        return [score for score in self.evaluations if _kind(score) == kind and not score.get("tta")]


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
    objects = [records.read_json_if_any(directory / f"{of}.json") for of in ("config", "environment", "result")]
    try:
        told = [record for record in records.read(directory / records.METRICS) if isinstance(record["step"], int)]
    except OSError as error:
        raise UsageError(f"{directory / records.METRICS} cannot be read: {error.strerror}; give a run's own") from None
    training, evaluations = ([record for record in told if record["kind"] == kind] for kind in ("train", "eval"))
    if not training and not evaluations:
        raise UsageError(f"{directory} holds no records of a run in {records.METRICS}; give one, as runs/speed94-seed0")
    objects = [found if isinstance(found, dict) else {} for found in objects]
    return Run(name, directory, *objects, training, evaluations)


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but the seed, by the recipe's name and what tells it from others of that name."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps(run.recipe, sort_keys=True), []).append(run)
    names: dict[str, list[Run]] = {}
    for group in alike.values():
        recipe, title = group[0].recipe, group[0].title
        others = [other[0].recipe for other in alike.values() if other[0].title == title]
        odd = [key for key in recipe if any(other.get(key) != recipe[key] for other in others)]
        name = _short(", ".join([title, *(f"{key}={_text(recipe[key])}" for key in odd[:2])]), 44)
        numbered = (name + (f" #{number}" if number > 1 else "") for number in itertools.count(1))
        names[next(name for name in numbered if name not in names)] = group
    return names


def page(runs: Sequence[Run]) -> str:
    """The whole HTML page, its pictures and styles inside."""
    groups = grouped(runs)
    title = "; ".join(f"{name} ({_seeds(group)})" for name, group in groups.items())
    sections = {
        "Result": _summary(groups),
        "Curves": _curves(groups),
        "Where it fails": _grid(_confusions(groups)) + _grid(map(_mistakes, runs)),
        "Towers": _towers(runs),
        "Where the seconds went": _seconds(runs),
        "Settings": _settings(runs),
        "Where it ran": _environments(runs),
        "To run it again": _commands(runs),
        "Model and variables": _listings(runs),
    }
    body = "".join(f"<section>\n<h2>{name}</h2>\n{told}</section>\n" for name, told in sections.items() if told)
    return PAGE.format(title=html.escape(_short(title, 200)), style=STYLE, banners=_banners(runs), body=body)


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
    return _table(headings, rows, marked=means) + f"<p>{note}</p>\n"


FIGURES = (
    ("training loss", "last record"), "images/s", ("training, s", "with input, compilation"), "steps", "recipe", "seed",
    "towers", "precision", "bad steps", ("weights", "sha256"),
)  # fmt: skip


def _summary_row(run: Run, which: Iterable[str]) -> list:
    result, last = run.result if run.finished else {}, run.training[-1] if run.training else {}
    scores = [run.scores.get(name, {}) for name in which]
    seconds = result.get("seconds") if isinstance(result.get("seconds"), dict) else {}
    steps = [value for key in STEPPING if math.isfinite(value := _number(seconds.get(key)))]
    state = "" if run.finished else "unfinished"
    if _number(result.get("reached")) > 0:
        state = f"reached {_told(result['reached'], '.2f', 100)} %"
    bad, rollbacks = result.get("bad_steps", last.get("bad_steps")), result.get("rollbacks")
    return [
        run.name,
        *((_told(s.get("accuracy"), ".2f", 100), f"loss {_told(s.get('loss'), '.4f')}" if s else "") for s in scores),
        _told(last.get("loss"), ".4f"),
        _told(result.get("images_per_sec", last.get("images_per_sec")), ",.0f"),
        _told(math.fsum(steps), ",.1f") if steps else "-",
        (_told(run.step, ",.0f"), state),
        run.title,
        _text(run.config.get("seed")),
        _text(len(run.towers) or None),
        run.precision,
        (_told(bad, ",.0f"), f"{_text(rollbacks)} rollbacks" if rollbacks else ""),
        _text(result.get("weights_sha256"))[:16],
    ]


def _spread(group: Iterable[Run], which: str) -> tuple[str, str]:
    """Mean in percent; standard deviation and n."""
    found = [_number(run.scores.get(which, {}).get("accuracy")) for run in group if run.finished]
    found = [100 * value for value in found if math.isfinite(value)]
    if not found:
        return "-", ""
    spread = f"± {statistics.stdev(found):.2f}, " if len(found) > 1 else ""
    return f"{statistics.fmean(found):.2f}", f"{spread}n={len(found)}"


def _curves(groups: Groups) -> str:
    """Pictures of what changes from epoch to epoch, a line a group, which has its colour in all of them."""
    everything = [run for group in groups.values() for run in group]
    kinds = dict.fromkeys(_kind(record) for run in everything for record in run.evaluations)
    drawn: list[str] = []
    for kind in kinds:
        histories = {name: [_history(run.plain(kind), "accuracy", 100) for run in of] for name, of in groups.items()}
        title = f"{_short(kind.replace(',', ' accuracy,', 1), 60)}, no TTA"
        drawn += _pictures({name: curve(of) for name, of in histories.items()}, title, "accuracy, %")
    for key, title, axis, scale in CURVES:
        histories = {name: [_history(run.training, key, scale) for run in of] for name, of in groups.items()}
        drawn += _pictures({name: curve(of, POINTS) for name, of in histories.items()}, title, axis)
    notes = []
    if len(everything) > len(groups):
        notes.append("A line is the mean of a group's runs, the band goes from their lowest to their highest value.")
        if not all(run.finished for run in everything):
            notes.append("Past the end of an unfinished run both are of the others.")
    if any(len(run.training) > POINTS for run in everything):
        notes.append("A point of a long run's training is the mean of several records.")
    return (f"<p>{' '.join(notes)}</p>\n" if drawn and notes else "") + _grid(drawn)


def _pictures(curves: Mapping[str, tuple], title: str, axis: str) -> Iterable[str]:
    """As many as it takes to tell them apart; none if there is nothing to see."""
    from cifar_towers.reporting import pictures  # takes a second or two: after all that can go wrong

    parts = math.ceil(len(curves) / TOGETHER)
    for part in range(parts):
        shown = dict(itertools.islice(curves.items(), part * TOGETHER, (part + 1) * TOGETHER))
        if not any(len(x) for x, *_ in shown.values()):
            continue
        numbered = title + (f" ({part + 1} of {parts})" if parts > 1 else "")
        ends = [f"{name} {y[-1]:,.4g}" if len(x) else f"{name} none" for name, (x, y, *_) in shown.items()]
        named = {name + ("" if len(of[0]) else ": not recorded"): of for name, of in shown.items()}
        alt = f"{numbered}, by epoch; at the end: {'; '.join(ends)}"
        yield _image(pictures.png(pictures.lines(named, numbered, "epoch", axis)), alt)


def _history(told: Iterable[Mapping], key: str, scale: float) -> dict[float, float]:
    """{epoch: value} of the records that have both; a rate of 0 is none, before a first step could be timed."""
    told = (record for record in told if key != "images_per_sec" or record.get(key) != 0)
    found = {_number(record.get("epoch")): scale * _number(record.get(key)) for record in told}
    return {epoch: value for epoch, value in found.items() if math.isfinite(epoch) and math.isfinite(value)}


def curve(histories: Sequence[Mapping[float, float]], most: int = 0) -> tuple[np.ndarray, ...]:
    """Of several runs' {epoch: value}: epochs [n] and mean [n], and of more than one run also lowest and highest [n].

    If there are more than `most`, and that is not 0, neighbours are averaged first.

    >>> [column.tolist() for column in curve([{1: 2.0, 2: 4.0}, {1: 4.0}])]
    [[1.0, 2.0], [3.0, 4.0], [2.0, 4.0], [4.0, 4.0]]
    """
    epochs = sorted(set().union(*histories))
    together = math.ceil(len(epochs) / most) or 1 if most else 1
    parts = [epochs[start : start + together] for start in range(0, len(epochs), together)]
    means = [
        [statistics.fmean(found) for history in histories if (found := [history[e] for e in part if e in history])]
        for part in parts
    ]
    summaries = (np.mean, np.min, np.max) if len(histories) > 1 else (np.mean,)
    x = np.array([statistics.fmean(part) for part in parts])
    return x, *(np.array([of(column) for column in means]) for of in summaries)


def _confusions(groups: Groups) -> list[str]:
    """The last evaluation of each group, summed over its finished runs, or of the one that has got furthest."""
    from cifar_towers.reporting import pictures

    drawn = []
    for name, group in groups.items():
        counted = [run for run in group if run.finished] or [max(group, key=lambda run: run.step)]
        found: dict[str, list] = {}
        for run in counted:
            for which, score in run.scores.items():
                found.setdefault(which, []).extend((run, counts) for counts in _counts(score))
        found = {which: summed for which, summed in found.items() if summed}
        if not found:
            continue
        which, summed = list(found.items())[-1]
        counts = sum(counts for _, counts in summed)
        names = [_short(_text(name), 20) for name in _list(summed[0][0].environment.get("class_names"))]
        names = names if len(names) == CLASSES else [str(number) for number in range(CLASSES)]
        of = _short(f"{name}, {_seeds([run for run, _ in summed])}: {which}", 160)
        wrong = np.where(np.eye(CLASSES, dtype=bool), -1, counts)
        true, taken = divmod(int(wrong.argmax()), CLASSES)
        alt = f"confusion matrix of {of}: {np.trace(counts):,} of {counts.sum():,} right"
        alt += f"; most often, {counts[true, taken]:,} times, {names[true]} is taken for {names[taken]}"
        drawn.append(_image(pictures.png(pictures.confusion_matrix(counts, names, of)), alt))
    return drawn


def _counts(score: Mapping) -> list[np.ndarray]:
    """The confusion matrix [10, 10] of a score, if it has one."""
    try:
        counts = np.array(score.get("confusion"), np.int64)
    except (TypeError, ValueError, OverflowError):
        return []
    return [counts] if counts.shape == (CLASSES, CLASSES) and counts.min() >= 0 else []


def _mistakes(run: Run) -> str:
    """The sheet of surest mistakes, if there is a whole one."""
    from PIL import Image

    try:
        png = (run.directory / "mistakes.png").read_bytes()
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    alt = f"the surest mistakes of {run.name}, each image with the class it was taken for and its own"
    return _image(png, alt, f"Surest mistakes of {run.name}")


def _towers(runs: Sequence[Run]) -> str:
    """A row a tower: mean over the records that tell of it, and the last of them."""
    rows = [row for run in runs for row in _tower_rows(run)]
    headings = ["run", "tower", "device"]
    headings += [(what, when) for what in ("loss", "gradient norm", "cosine") for when in ("mean", "last")]
    note = "Means are over the recorded steps; the cosine is of the tower's gradient to the mean of all towers'."
    return _table([*headings, "records"], rows, left=3) + f"<p>{note}</p>\n" if rows else ""


def _tower_rows(run: Run) -> Iterable[list]:
    told = [record["towers"] for record in run.training if isinstance(record.get("towers"), dict)]
    number = len(_list(told[-1].get("loss"))) if told else len(run.towers)
    told = [of for of in told if len(_list(of.get("loss"))) == number]  # none of when there were more, or fewer
    for index in range(number):
        tower = run.towers[index] if len(run.towers) == number else {}
        row = [run.name, _text(tower.get("name", f"tower_{index}")), _text(tower.get("device"))]
        for key in ("loss", "gradient_norm", "cosine"):
            values = [_number(_list(of.get(key))[index]) for of in told if len(_list(of.get(key))) == number]
            values = [value for value in values if math.isfinite(value)]
            row += [_told(statistics.fmean(values), ".4g"), _told(values[-1], ".4g")] if values else ["-", "-"]
        yield [*row, str(len(told))]


def _seconds(runs: Sequence[Run]) -> str:
    spent = {run.name: run.result.get("seconds") for run in runs if run.finished}
    spent = {name: of for name, of in spent.items() if isinstance(of, dict)}
    activities = list(dict.fromkeys(activity for of in spent.values() for activity in of))
    rows = []
    for name, of in spent.items():
        total = math.fsum(value for value in map(_number, of.values()) if math.isfinite(value))
        cells = [
            (_told(of.get(key), ",.1f"), f"{_told(of.get(key), '.1f', 100 / (total or 1))} %") for key in activities
        ]
        rows.append([name, *cells, f"{total:,.1f}"])
    return _table(["run", *activities, "total, s"], rows) if activities else ""


def _settings(runs: Sequence[Run]) -> str:
    """What differs between the runs in a table, the rest folded away."""
    odd, common = _side_by_side({run.name: run.config for run in runs})
    told = f"{len(common)} settings" + (" that all runs share" if len(runs) > 1 else "")
    return odd + (_folded(told, _table(["", "value"], common, left=2)) if common else "")


def _environments(runs: Sequence[Run]) -> str:
    apart = {"command", "towers", "synthetic_data", "class_names", "variables", "model"}  # shown elsewhere
    told = {run.name: {name: of for name, of in run.environment.items() if name not in apart} for run in runs}
    odd, common = _side_by_side(told)
    return odd + (_table(["", "all runs" if odd else ""], common, left=2) if common else "")


def _side_by_side(columns: Mapping[str, Mapping]) -> tuple[str, list]:
    """A table of what differs, if anything does, and the rows (name, value) of what does not."""
    flat = {name: _flat(of) for name, of in columns.items()}
    keys = list(dict.fromkeys(key for of in flat.values() for key in of))
    rows = {key: [of.get(key, "-") for of in flat.values()] for key in keys}
    odd = [[key, *values] for key, values in rows.items() if len(set(values)) > 1]
    common = [[key, values[0]] for key, values in rows.items() if len(set(values)) == 1]
    return _table(["", *flat], odd, left=1 + len(flat)) if odd else "", common


def _commands(runs: Sequence[Run]) -> str:
    """The command of each, once."""
    lines = []
    for of, command in _shared(runs, lambda run: _list(run.environment.get("command"))):
        words = [_text(word) for word in command]
        words = ["python", *words] if words[0].endswith(".py") else words
        lines.append(f"{f'<p>{html.escape(of)}</p>' if of else ''}<pre>{html.escape(shlex.join(words))}</pre>\n")
    again = "<p>Where a finished run stands, nothing is repeated: name another <code>--train_dir</code>.</p>\n"
    return "".join(lines) + again if lines else ""


def _listings(runs: Sequence[Run]) -> str:
    """Layers and variables, folded away, each list once."""
    told = []
    for key, what, summed in (("model", "layers", ("parameters", "flops")), ("variables", "variables", ("bytes",))):

        def items_of(run, key=key):
            return [item for item in _list(run.environment.get(key)) if isinstance(item, dict)]

        for of, items in _shared(runs, items_of):
            fields = list(dict.fromkeys(field for item in items for field in item))
            rows = [
                [_told(item.get(field), ",.0f") if field in summed else _text(item.get(field)) for field in fields]
                for item in items
            ]
            totals = {field: np.nansum([_number(item.get(field)) for item in items]) for field in summed}
            sums = ", ".join(f"{total:,.0f} {field}" for field, total in totals.items())
            words = len([field for field in fields if field not in summed])
            told.append(_folded(f"{of}{len(items):,} {what}, {sums}", _table(fields, rows, left=words)))
    return "".join(told)


# What they are made of ------------------------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Iterable[Sequence], left: int = 1, marked: Sequence[int] = ()) -> str:
    """A table in a box that scrolls; a cell is a text, or a pair of which the second stands small under the first.

    Args:
      left: how many columns hold words, not figures. marked: the rows that stand out.
    """
    heads = "".join(_element("th", heading, column < left, ' scope="col"') for column, heading in enumerate(headings))
    lines = []
    for place, row in enumerate(rows):
        cells = (
            _element("td" if column else "th", cell, column < left, "" if column else ' scope="row"')
            for column, cell in enumerate(row)
        )
        lines.append(f"<tr{MEAN if place in marked else ''}>{''.join(cells)}</tr>\n")
    inside = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0"><table>\n{inside}</table></div>\n'


def _element(tag: str, cell: str | tuple[str, str], words: bool, more: str) -> str:
    text, small = cell if isinstance(cell, tuple) else (cell, "")
    small = f"<small>{html.escape(small)}</small>" if small else ""
    return f"<{tag}{more}{WORDS if words else ''}>{html.escape(text)}{small}</{tag}>"


def _folded(summary: str, inside: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>\n{inside}</details>\n"


def _image(png: bytes, alt: str, caption: str = "") -> str:
    encoded = base64.b64encode(png).decode()
    told = f"<figcaption>{html.escape(caption)}</figcaption>\n" if caption else ""
    return f'<figure>{told}<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}"></figure>\n'


def _grid(images: Iterable[str]) -> str:
    """As many beside each other as there is room for."""
    told = "".join(images)
    return f'<div class="grid">\n{told}</div>\n' if told else ""


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


def _seeds(group: Sequence[Run]) -> str:
    return f"seed{'s' * (len(group) > 1)} {', '.join(_text(run.config.get('seed')) for run in group)}"


def _kind(score: Mapping) -> str:
    """What a score is of, but for its augmentation."""
    return f"{_text(score.get('split'))}, {_text(score.get('weights'))} weights"


def _which(score: Mapping) -> str:
    return f"{_kind(score)}, {'TTA ' + _text(score['tta']) if score.get('tta') else 'no TTA'}"


def _flat(value: Mapping, prefix: str = "") -> dict[str, str]:
    """Nested objects by their path, all values as text."""
    found = {}
    for key, of in value.items():
        found |= _flat(of, f"{prefix}{key}.") if isinstance(of, dict) else {prefix + key: _text(of)}
    return found


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    """The value if it is a finite number, else NaN."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return value if sound else math.nan


def _told(value: Any, form: str, scale: float = 1) -> str:
    """A number in words, `-` for what is none."""
    number = _number(value) * scale
    return format(number, form) if math.isfinite(number) else "-"


def _text(value: Any) -> str:
    """Any value of a JSON file, `-` for none."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _short(text: str, most: int) -> str:
    """On one line of at most so many characters, all of which a picture can hold."""
    text = " ".join(text.encode(errors="replace").decode().split())
    return text if len(text) <= most else text[: most - 1] + "…"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<style>
{style}</style></head><body>
<h1>{title}</h1>
{banners}{body}</body></html>
"""

STYLE = """:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1b1b; --muted: #5c5c5c; --line: #ddd; --mark: #eef4f8;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e6e6e6; --muted: #a6a6a6; --line: #3a3d42; --mark: #1f2a33 }
}
body {
  font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); overflow-wrap: anywhere;
  max-width: 84rem; margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem;
}
h1 { font-size: 1.6rem; line-height: 1.25; text-wrap: balance }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem }
p { max-width: 48rem; color: var(--muted) }
.banner { max-width: none; padding: .6rem 1rem; border-radius: .4rem; color: #000; background: #ffd54d }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.35; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line) }
th { font-weight: 600 }
thead th { color: var(--muted) }
th, td { white-space: nowrap }
.words { text-align: left }
tr > :first-child { position: sticky; left: 0; background: var(--paper) }
tr.mean > * { background: var(--mark); font-weight: 600 }
small { display: block; color: var(--muted); font-size: .75rem; font-weight: 400 }
img { max-width: max(100%, 34rem); box-sizing: border-box; background: #fff; padding: .4rem; border-radius: .4rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 1rem }
figure { margin: 0; overflow-x: auto }
figcaption { font-weight: 600; margin: .5rem 0 }
pre { white-space: pre-wrap; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem }
summary { cursor: pointer; padding: .4rem 0 }
@media print {
  :root { font-size: 9.5px }
  body { max-width: none; padding: 0 }
  .wide, figure { overflow: visible }
  th, td { white-space: normal; overflow-wrap: normal; padding: .2rem .3rem }
  td.words { overflow-wrap: anywhere }
  img { max-width: 100% }
  .grid { grid-template-columns: 1fr 1fr }
  figure, tr, pre { break-inside: avoid }
  h2 { break-after: avoid }
}
"""
