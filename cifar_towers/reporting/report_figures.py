"""The pictures of the page about runs: curves, confusion matrices and mistakes, as HTML."""

import io
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cifar_towers.files import run_files
from cifar_towers.reporting import markup
from cifar_towers.reporting.run_records import Groups, Run, as_list, as_number, as_text, kind_of, seeds_of, shortened

CURVES = (  # key of the training records, title, axis, unit of the axis in units of the record
    ("loss", "training loss, of the batch", "loss", 1),
    ("accuracy", "training accuracy, of the batch", "accuracy, %", 100),
    ("learning_rate", "learning rate", "learning rate", 1),
    ("gradient_norm", "gradient norm", "norm", 1),
    ("images_per_sec", "images a second", "images/s", 1),
    ("input_wait", "time spent waiting for input", "of the time, %", 100),
    ("gradient_noise_scale", "gradient noise scale", "examples", 1),
)
POINTS = 120  # of a curve, at most
TOGETHER = 8  # curves that a picture tells apart


def curves(groups: Groups) -> str:
    """Pictures of what changes from epoch to epoch, a line a group, which has its colour in all of them."""
    everything = [run for group in groups.values() for run in group]
    kinds = dict.fromkeys(kind_of(record) for run in everything for record in run.evaluations)
    drawn: list[str] = []
    for kind in kinds:
        histories = {name: [_history(run.plain(kind), "accuracy", 100) for run in of] for name, of in groups.items()}
        title = f"{shortened(kind.replace(',', ' accuracy,', 1), 60)}, no TTA"
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
    return (f"<p>{' '.join(notes)}</p>\n" if drawn and notes else "") + markup.grid(drawn)


def _pictures(curves: Mapping[str, tuple], title: str, axis: str) -> Iterable[str]:
    """As many as it takes to tell them apart; none if there is nothing to see."""
    from cifar_towers.reporting import figures  # takes a second or two: after all that can go wrong

    parts = math.ceil(len(curves) / TOGETHER)
    for part in range(parts):
        shown = dict(itertools.islice(curves.items(), part * TOGETHER, (part + 1) * TOGETHER))
        if not any(len(x) for x, *_ in shown.values()):
            continue
        numbered = title + (f" ({part + 1} of {parts})" if parts > 1 else "")
        ends = [f"{name} {y[-1]:,.4g}" if len(x) else f"{name} none" for name, (x, y, *_) in shown.items()]
        named = {name + ("" if len(of[0]) else ": not recorded"): of for name, of in shown.items()}
        alt = f"{numbered}, by epoch; at the end: {'; '.join(ends)}"
        yield markup.picture(figures.png(figures.lines(named, numbered, "epoch", axis)), alt)


def _history(told: Iterable[Mapping], key: str, scale: float) -> dict[float, float]:
    """{epoch: value} of the records that have both; a rate of 0 is none, before a first step could be timed."""
    told = (record for record in told if key != "images_per_sec" or record.get(key) != 0)
    found = {as_number(record.get("epoch")): scale * as_number(record.get(key)) for record in told}
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


def confusions(groups: Groups) -> list[str]:
    """The last evaluation of each group, summed over its finished runs, or of the one that has got furthest."""
    from cifar_towers.reporting import figures

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
        names = [shortened(as_text(name), 20) for name in as_list(summed[0][0].environment.get("class_names"))]
        names = names if len(names) == len(counts) else [str(number) for number in range(len(counts))]
        of = shortened(f"{name}, {seeds_of([run for run, _ in summed])}: {which}", 160)
        wrong = np.where(np.eye(len(counts), dtype=bool), -1, counts)
        true, taken = divmod(int(wrong.argmax()), len(counts))
        alt = f"confusion matrix of {of}: {np.trace(counts):,} of {counts.sum():,} right"
        alt += f"; most often, {counts[true, taken]:,} times, {names[true]} is taken for {names[taken]}"
        drawn.append(markup.picture(figures.png(figures.confusion_matrix(counts, names, of)), alt))
    return drawn


def _counts(score: Mapping) -> list[np.ndarray]:
    """The confusion matrix [C, C] of a score, if it has one that can be drawn."""
    from cifar_towers.reporting import figures

    try:
        counts = np.array(score.get("confusion"), np.int64)
    except (TypeError, ValueError, OverflowError):
        return []
    square = counts.ndim == 2 and 1 < len(counts) == counts.shape[1] <= figures.MOST_CLASSES
    return [counts] if square and counts.min() >= 0 else []


def mistakes(run: Run) -> str:
    """The sheet of most confident mistakes, if there is a whole one."""
    from PIL import Image

    try:
        png = (run.directory / run_files.MISTAKES).read_bytes()
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    alt = f"the most confident mistakes of {run.name}, each image with the class it was taken for and its own"
    return markup.picture(png, alt, f"Surest mistakes of {run.name}")
