"""What was measured of growth, as a table, a sentence, JSON and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cifar_towers.benchmark.cases import NO_EXCHANGE
from cifar_towers.benchmark.growth_points import Line, Point, Row, Series, fit
from cifar_towers.benchmark.report import COLOURS
from cifar_towers.benchmark.report_io import align, png, publish_text, title

HEADINGS = (
    "varied", "model", "batch", "towers", "a step", "fastest-slowest", "n", "images/s", "memory", "start", "compile",
)  # fmt: skip
MEASURED, COMPILING, STARTING = COLOURS["towers"], COLOURS["mirrored"], COLOURS[NO_EXCHANGE]


def publish(
    directory: Path,
    facts: Mapping,
    series: Sequence[Series],
    rows: Mapping[Point, Row],
    left_out: Mapping[Point, str],
) -> None:
    """Prints table, what was left out, and conclusion; writes growth.json, growth.txt, growth.png."""
    time, memory = lines_of_batch(series, rows)
    conclusion = conclude(facts, series, rows)
    lacking = "\n".join(f"left out: {point.told()}: {why}" for point, why in left_out.items())
    told = {
        "rows": [
            {"varied": one.varied, "size": size, **row.point._asdict(), **_figures(row)}
            for one in series
            for size, row in _measured(one, rows)
        ],
        "left_out": [{**point._asdict(), "why": why} for point, why in left_out.items()],
        "seconds_by_batch": time and time._asdict(),
        "memory_mb_by_batch": memory and memory._asdict(),
        "conclusion": conclusion,
    }
    parts = [_title(facts), table(series, rows), lacking]
    more = {"growth.png": plot(series, rows, facts)}
    publish_text(directory, "growth", {**facts, **told}, parts, more, conclusion)


def lines_of_batch(series: Sequence[Series], rows: Mapping[Point, Row]) -> tuple[Line | None, Line | None]:
    """Seconds and MB of a step, by batch size."""
    found = [row for _, row in _measured(series[0], rows)]
    sizes = [row.point.batch_size for row in found]
    return fit(sizes, [row.median for row in found]), fit(sizes, [row.memory_mb for row in found])


def conclude(facts: Mapping, series: Sequence[Series], rows: Mapping[Point, Row]) -> str:
    """What the figures say, in one line."""
    batches, towers, models = ([row for _, row in _measured(one, rows)] for one in series)
    time, memory = lines_of_batch(series, rows)
    told = []
    if time:
        span = f"{time.n} batches of {batches[0].point.batch_size:,} to {batches[-1].point.batch_size:,}"
        told.append(f"by {span} a step of {facts['model']} takes {time.told('ms', 1000)}")
    if memory:
        told.append(f"its process holds {memory.told('MB')}")
    if len(towers) > 1:
        few, many = towers[0], towers[-1]
        counts = f"{many.point.towers} towers take {many.median / few.median:.2f} times as long as {few.point.towers}"
        more = f", and {many.memory_mb / few.memory_mb:.2f} times the memory" if few.memory_mb else ""
        told.append(counts + more)
    if len(models) > 1:
        slow, *_, fast = sorted(models, key=lambda row: row.images_per_sec)
        rates = f"{fast.point.model}'s {fast.images_per_sec:,.0f} to {slow.point.model}'s {slow.images_per_sec:,.0f}"
        told.append(f"models go from {rates} images/s")
    last = max(rows.values(), key=_until_first_step)
    told.append(f"the longest start, compilation included, takes {_until_first_step(last):.0f} s ({last.point.told()})")
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}."


def table(series: Sequence[Series], rows: Mapping[Point, Row]) -> str:
    """Aligned text, a point a line, by what is varied; a point of two series stands in both."""
    found = [(one.varied, row) for one in series for _, row in _measured(one, rows)]
    return align([HEADINGS, *(_cells(varied, row) for varied, row in found)], left=(0, 1))


def _cells(varied: str, row: Row) -> list[str]:
    model, batch_size, towers = row.point
    low, high = min(row.step_seconds), max(row.step_seconds)
    return [
        varied,
        model,
        f"{batch_size:,}",
        str(towers),
        f"{1000 * row.median:,.0f} ms",
        f"{1000 * low:,.0f}-{1000 * high:,.0f}",
        str(len(row.step_seconds)),
        f"{row.images_per_sec:,.0f}",
        f"{row.memory_mb:,.0f} MB" if row.memory_mb else "-",
        f"{row.start_seconds:.1f} s",
        f"{row.compile_seconds:.1f} s",
    ]


def plot(series: Sequence[Series], rows: Mapping[Point, Row], facts: Mapping) -> bytes:
    """PNG: a column for each thing that is varied; images/s, memory, and seconds before the first step."""
    shown = [one for one in series if _measured(one, rows)]
    figure = Figure((4.4 * len(shown), 8.4), layout="constrained")
    panels = figure.subplots(3, len(shown), squeeze=False, sharex="col")
    time, memory_line = lines_of_batch(series, rows)
    for one, (speed, memory, start) in zip(shown, panels.T, strict=True):
        sizes, found = zip(*_measured(one, rows), strict=True)
        bars = one.varied == "model"
        rates = [row.images_per_sec for row in found]
        ends = [[row.point.batch_size / each(row.step_seconds) for row in found] for each in (max, min)]
        _draw(speed, sizes, rates, MEASURED, "", bars)
        speed.vlines(sizes, *ends, color="#444444", linewidth=1)
        _draw(memory, sizes, [row.memory_mb for row in found], MEASURED, "", bars)
        _draw(start, sizes, [_until_first_step(row) for row in found], COMPILING, "start and compile", bars)
        _draw(start, sizes, [row.start_seconds for row in found], STARTING, "start", bars)
        if one is series[0] and len(sizes) > 1:
            at, dotted = np.geomspace(sizes[0], sizes[-1], 100), {"color": "#222222", "linestyle": ":", "linewidth": 1}
            speed.plot(at, at / time.at(at), label="batch / (a + b x batch) s", **dotted)
            if memory_line:
                memory.plot(at, memory_line.at(at), label="c + d x batch", **dotted)
        if bars:
            start.set_xticks(sizes, [row.point.model for row in found], rotation=40, ha="right")
        else:
            start.set_xscale("log", base=2)
            start.set_xticks(sizes, [f"{size:,}" for size in sizes])
            start.minorticks_off()
        for panel in (speed, memory, start):
            panel.set_ylim(bottom=0)
            panel.spines[["top", "right"]].set_visible(False)
        speed.set_title(_headline(one, facts), fontsize=10)
        start.set_xlabel(one.varied)
    rows_told = {"images/s, median and range": "lower right", "memory, MB": "upper left", "before step 1, s": "best"}
    for panel, (told, place) in zip(panels[:, 0], rows_told.items(), strict=True):
        panel.set_ylabel(told)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, loc=place)
    figure.suptitle(f"{facts['recipe']}, {facts['precision']}; {facts['processor']}, {facts['date']}")
    return png(figure)


def _draw(panel, sizes, values, color: str, label: str, bars: bool) -> None:
    if bars:
        panel.bar(sizes, values, color=color, label=label, width=0.75, edgecolor="white")
    else:
        panel.plot(sizes, values, color=color, label=label, marker="o", markersize=4)


def _headline(one: Series, facts: Mapping) -> str:
    """What all points of a series have in common."""
    model, batch_size, towers = one.points[0]
    on = f"{towers} tower{'s' * (towers > 1)}"
    return {
        "batch size": f"{model}, {on}",
        "towers": f"{model}, batches of {batch_size:,}",
        "model": f"batches of {batch_size:,}, {on}",
    }[one.varied]


def _title(facts: Mapping) -> str:
    told = title(facts, f"{facts['model']} and others", facts["precision"], facts["dataset"])
    return f"{told}, {facts['minutes']:.0f} min"


def _measured(one: Series, rows: Mapping[Point, Row]) -> list[tuple[int, Row]]:
    """(size, row) of those points of a series that could be had."""
    return [(size, rows[point]) for size, point in zip(one.sizes, one.points, strict=True) if point in rows]


def _until_first_step(row: Row) -> float:
    return row.start_seconds + row.compile_seconds


def _figures(row: Row) -> dict:
    return {
        "step_seconds": row.step_seconds,
        "median": row.median,
        "images_per_sec": row.images_per_sec,
        "memory_mb": row.memory_mb,
        "start_seconds": row.start_seconds,
        "compile_seconds": row.compile_seconds,
    }
