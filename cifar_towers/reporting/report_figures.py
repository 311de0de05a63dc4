"""The pictures of the HTML report: curves, confusion matrices and the most confident mistakes."""

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from PIL import Image

from cifar_towers import files
from cifar_towers.reporting import figures, run_records
from cifar_towers.reporting.charts import REPORT_CURVES, Curve
from cifar_towers.reporting.html_page import Picture
from cifar_towers.reporting.run_records import Groups, RunRecord, as_list, as_number, as_text, score_kind, shorten
from cifar_towers.reporting.sample import Sample

MAX_POINTS = 120  # of a curve of training records
MAX_CURVES = 8  # that can be distinguished in one picture


def curves(groups: Groups) -> list[Picture]:
    """Pictures of the accuracies and of `REPORT_CURVES` by epoch; a group has one line, of the same color in all."""
    pictures: list[Picture] = []
    runs = [run for group in groups.values() for run in group]
    for kind in dict.fromkeys(score_kind(score) for run in runs for score in run.evaluations):
        title = f"{shorten(kind.replace(',', ' accuracy,', 1), 60)}, no TTA"
        records = {name: [run.evaluations_without_tta(kind) for run in group] for name, group in groups.items()}
        pictures += _plot(Curve("accuracy", title, "accuracy, %", 100), records)
    training = {name: [run.training for run in group] for name, group in groups.items()}
    for chart in REPORT_CURVES:
        pictures += _plot(chart, training, MAX_POINTS)
    return pictures


def describe_curves(groups: Groups) -> str:
    """What lines, bands and points of the curves are."""
    runs = [run for group in groups.values() for run in group]
    notes = []
    if len(runs) > len(groups):
        notes.append("A line is the mean of a group's runs, the band one standard deviation to either side.")
        if not all(run.finished for run in runs):
            notes.append("After the end of an unfinished run both are of the others.")
    if any(len(run.training) > MAX_POINTS for run in runs):
        notes.append("A point of a long run's training is the mean of several records.")
    return " ".join(notes)


def _plot(chart: Curve, records: Mapping[str, Sequence[Iterable[Mapping]]], max_points: int = 0) -> Iterable[Picture]:
    """The pictures of a chart, each of up to `MAX_CURVES` groups; none if there is nothing to plot."""
    lines = {name: mean_curve([_history(run, chart) for run in runs], max_points) for name, runs in records.items()}
    names = list(lines)
    parts = [names[start : start + MAX_CURVES] for start in range(0, len(names), MAX_CURVES)]
    for number, part in enumerate(parts, 1):
        if not any(len(lines[name][0]) for name in part):
            continue
        title = chart.title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        ends = [f"{name} {y[-1]:,.4g}" if len(y) else f"{name} none" for name in part for y in [lines[name][1]]]
        labeled = {name if len(lines[name][0]) else f"{name}: not recorded": lines[name] for name in part}
        png = figures.png(figures.line_plot(labeled, title, "epoch", chart.y_label))
        yield Picture(png, f"{title}, by epoch; at the end: {'; '.join(ends)}")


def _history(records: Iterable[Mapping], chart: Curve) -> dict[float, float]:
    """{epoch: value} of the records that have both; a throughput of 0 is an older run's for none yet."""
    records = (record for record in records if chart.key != "images_per_sec" or record.get(chart.key) != 0)
    history = {as_number(record.get("epoch")): chart.scale * as_number(record.get(chart.key)) for record in records}
    return {epoch: value for epoch, value in history.items() if math.isfinite(epoch) and math.isfinite(value)}


def mean_curve(histories: Sequence[Mapping[float, float]], max_points: int = 0) -> tuple[np.ndarray, ...]:
    """Epochs [n] and mean [n] of several runs' {epoch: value}; of more than one run also the mean less and plus one
    standard deviation (of the sample) [n].

    If there are more than `max_points`, and that is not 0, neighbors are averaged first.
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


def confusion_matrices(groups: Groups) -> list[Picture]:
    """The last evaluation of each group, summed over its finished runs, or of the run with the most steps."""
    pictures = []
    for name, group in groups.items():
        runs = [run for run in group if run.finished] or [max(group, key=lambda run: run.step)]
        matrices: dict[str, list[tuple[RunRecord, np.ndarray]]] = {}
        for run in runs:
            for score, record in run.scores.items():
                counts = _confusion_counts(record)
                if counts is not None:
                    matrices.setdefault(score, []).append((run, counts))
        if not matrices:
            continue
        score, summed = list(matrices.items())[-1]
        counts = sum(counts for _, counts in summed)
        names = [shorten(as_text(name), 20) for name in as_list(summed[0][0].environment.get("class_names"))]
        names = names if len(names) == len(counts) else [str(index) for index in range(len(counts))]
        title = shorten(f"{name}, {run_records.format_seeds([run for run, _ in summed])}: {score}", 160)
        png = figures.png(figures.confusion_matrix(counts, names, title))
        mistakes = np.where(np.eye(len(counts), dtype=bool), -1, counts)
        true, predicted = divmod(int(mistakes.argmax()), len(counts))
        alt = (
            f"confusion matrix of {title}: {np.trace(counts):,} of {counts.sum():,} right; most often, "
            f"{counts[true, predicted]:,} times, {names[true]} is taken for {names[predicted]}"
        )
        pictures.append(Picture(png, alt))
    return pictures


def _confusion_counts(score: Mapping) -> np.ndarray | None:
    """The confusion matrix [C, C] of a score, if it has one that can be drawn."""
    try:
        counts = np.array(score.get("confusion"), np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    square = counts.ndim == 2 and 1 < len(counts) == counts.shape[1] <= figures.MAX_CLASSES
    return counts if square and counts.min() >= 0 else None


def mistakes(runs: Iterable[RunRecord]) -> list[Picture]:
    """The runs' pictures of their most confident mistakes; one that is missing or damaged is left out."""
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
