"""What was measured, as a table, a sentence, JSON, a plot and a page."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED
from cifar_towers.benchmark.report_io import align, png, publish_text, title
from cifar_towers.benchmark.round_stats import Row
from cifar_towers.reporting import html_page
from cifar_towers.reporting.html_page import Picture, Section, Table
from cifar_towers.reporting.profiler import PARTS
from cifar_towers.towers.communication import Prediction
from cifar_towers.towers.placement import PLACEMENTS

WAITS, LOSES, SAME = 0.05, 0.05, 0.02  # shares above which a bottleneck is named, below which two rates are the same
COLOURS = {"towers": "#0072b2", "mirrored": "#d55e00", NO_EXCHANGE: "#999999", KERAS: "#009e73"}  # told apart by all


def publish(directory: Path, facts: Mapping, rows: Sequence[Row]) -> None:
    """Prints table and conclusion, and writes benchmark.json, benchmark.txt, benchmark.png and index.html."""
    picture, conclusion = plot(rows, facts), conclude(rows, facts)
    told = {"rows": [_as_json(row) for row in rows], "conclusion": conclusion}
    more = {"benchmark.png": picture, "index.html": page(rows, facts, picture)}
    publish_text(directory, "benchmark", facts | told, [_title(facts), table(rows)], more, conclusion)


def publish_prediction(
    directory: Path, facts: Mapping, row: Row, predictions: Sequence[Prediction], link_gb_per_s: float
) -> None:
    """Prints what was measured of one tower and what follows for more, and writes prediction.json, prediction.txt."""
    links = f"links of {link_gb_per_s:g} GB/s each way, nothing at the same time"
    parts = [
        _title(facts),
        table([row]),
        f"On GPUs as fast as one tower here, {links}:\n{prediction_table(predictions)}",
    ]
    told = {
        "measured": _as_json(row),
        "link_gb_per_s": link_gb_per_s,
        "predictions": [p._asdict() for p in predictions],
    }
    publish_text(directory, "prediction", facts | told, parts)


def _title(facts: Mapping) -> str:
    return title(facts, facts["model"], f"batches of {facts['batch_size']:,}", facts["dataset"])


def prediction_table(rows: Sequence[Prediction]) -> str:
    """Aligned text, a number of devices and a way a line; times in milliseconds."""
    lines = [("variables", "devices", "batch", "compute ms", "transfer ms", "step ms", "images/s", "efficiency")]
    for way, count, batch, *times, rate, efficiency in rows:
        told = [f"{1000 * seconds:.2f}" for seconds in times]
        lines.append((way, str(count), f"{batch:,}", *told, f"{rate:,.0f}", f"{efficiency:.1%}"))
    return align(lines, left=(0,))


def _as_json(row: Row) -> dict:
    return dataclasses.asdict(row) | {"variation": row.variation._asdict(), "median": row.median}


def table(rows: Sequence[Row]) -> str:
    """Aligned text, a variation a line, the fastest of a precision first."""
    return align([_headings(rows), *(_cells(row) for row in _sorted(rows))], left=(0, 1, 2, 4))


def _headings(rows: Sequence[Row]) -> tuple[str, ...]:
    return (
        "precision", "strategy", "placement", "towers", "input", "images/s", rows[0].spread_of, "n", "efficiency",
        "forward", "backward", "average", "apply", "other", "waiting", "compile",
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    variation, (low, high) = row.variation, row.spread
    shares = [f"{100 * row.shares[part]:.1f} %" if row.shares else "-" for part in PARTS]
    return [
        variation.precision,
        variation.strategy,
        variation.placement,
        str(variation.towers),
        variation.input,
        f"{row.median:,.0f}",
        f"{low:,.0f}-{high:,.0f}",
        row.n,
        f"{100 * row.efficiency:.1f} %" if row.efficiency else "-",
        *shares,
        f"{100 * row.waiting:.1f} %" if variation.input == "stream" else "-",
        f"{row.compile_seconds:.0f} s",
    ]


def conclude(rows: Sequence[Row], facts: Mapping) -> str:
    """One sentence: what bounds this machine, and which flags to use."""
    ours = [row for row in rows if row.variation.trains]
    top = max(row.median for row in ours)
    # of those that are as good as the fastest, the plainest: shared variables, on the CPU, few towers
    same = [row for row in ours if row.median >= (1 - SAME) * top]
    best = min(same, key=lambda row: _plainness(row.variation))
    bound = _bound(best, rows, facts)
    flags = _flags(best.variation)
    return f"This machine is bound by {bound}: use {flags} ({best.median:,.0f} images/s)."


def _plainness(variation) -> tuple:
    order = (*PLACEMENTS, UNPLACED)
    return variation.strategy != "towers", order.index(variation.placement), variation.towers


def _flags(variation) -> str:
    flags = [f"--num_gpus={variation.towers}", f"--precision={variation.precision}"]
    if variation.strategy == "mirrored":
        return " ".join([*flags, "--strategy=mirrored"])
    return " ".join([*flags, f"--variable_placement={variation.placement}"])


def _bound(best: Row, rows: Sequence[Row], facts: Mapping) -> str:
    """Input, exchange, too small a batch per tower, or compute, with the figures that say so."""
    alike = [row for row in rows if row.variation.precision == best.variation.precision]
    for row in alike:
        if row.variation.input == "stream" and row.waiting > WAITS and row.median < best.median:
            return (
                f"its input ({row.median:,.0f} images/s with it; {row.variation.towers} towers wait for it "
                f"{100 * row.waiting:.0f} % of the time)"
            )
    # towers that never meet say what several devices could do: as many as the best has, or more, where one is best
    several = best.variation.towers > 1
    apart = [row for row in alike if row.variation.strategy == NO_EXCHANGE]
    apart = [row for row in apart if not several or row.variation.towers == best.variation.towers]
    most = max(apart, key=lambda row: row.median, default=None)
    if most and best.median < (1 - LOSES) * most.median:
        lost = 100 * (1 - best.median / most.median)
        return f"the exchange between towers ({lost:.0f} % slower than {most.variation.towers} towers that never meet)"
    if most and 0 < most.efficiency < 1 - LOSES:
        share = facts["batch_size"] // most.variation.towers
        return (
            f"too small a batch per tower ({share} images: {most.variation.towers} towers that never meet reach "
            f"{100 * most.efficiency:.0f} % of what their devices do with a whole batch)"
        )
    if not best.shares:
        return "compute"
    busy = 100 * (best.shares["forward"] + best.shares["backward"])
    return f"compute ({busy:.0f} % of the work is forward and backward)"


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.variation.precision, -row.median))


def plot(rows: Sequence[Row], facts: Mapping) -> bytes:
    """PNG: a panel a precision, a bar a variation with its spread; a line where one tower stands."""
    precisions = sorted({row.variation.precision for row in rows})
    tallest = max(sum(row.variation.precision == precision for row in rows) for precision in precisions)
    top = max(row.spread[1] for row in rows)
    figure = Figure((7.2 * len(precisions), 1.6 + 0.3 * tallest), layout="constrained")
    panels = figure.subplots(1, len(precisions), squeeze=False)
    for panel, precision in zip(panels[0], precisions, strict=True):
        shown = [row for row in _sorted(rows) if row.variation.precision == precision]
        shown.sort(key=lambda row: (row.variation.towers, -row.median))
        for place, row in enumerate(shown):
            low, high = row.spread
            errors = [[row.median - low], [high - row.median]]
            panel.barh(
                place, row.median, xerr=errors, color=COLOURS[row.variation.strategy], ecolor="#444444", height=0.75,
                hatch="//" if row.variation.input == "stream" else "", edgecolor="white",
            )  # fmt: skip
            panel.text(high + 0.015 * top, place, f"{row.median:,.0f}", va="center", color="#222222", fontsize=8)
        panel.set_yticks(
            range(len(shown)), [f"{row.variation.told()}  x {row.variation.towers}" for row in shown], fontsize=9
        )
        panel.set_ylim(tallest - 0.4, -0.6)  # bars of one thickness in all panels
        panel.set_xlim(0, 1.12 * top)
        one = [row.median for row in shown if row.efficiency and row.variation[:3] == ("towers", "cpu", 1)]
        if one:
            panel.axvline(one[0], color="#222222", linestyle=":", linewidth=1)
        panel.set_xlabel(f"images/s, median and {rows[0].spread_of}; dotted: one tower")
        panel.set_title(precision)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{facts['recipe']}, batches of {facts['batch_size']:,}; {facts['processor']}, {facts['date']}")
    return png(figure)


def page(rows: Sequence[Row], facts: Mapping, picture: bytes) -> str:
    """One HTML file with everything in it."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    results = Section(
        "Results",
        conclude(rows, facts),
        [[Picture(picture, "images a second of every variation")]],
        [Table(_headings(rows), [_cells(row) for row in _sorted(rows)], text_columns=3)],
        note=f"{READING} Measured in {facts['minutes']:.0f} minutes with {packages}.",
    )
    return html_page.render(_title(facts), [results])


READING = (
    "Every variation makes the same update from the same batch of the recipe's size, as in the middle of a run. "
    "Images/s are the median over rounds, each of which visits all variations in a new order, after compilation; n is "
    "rounds x timed steps of a visit. 'no exchange' are towers with variables of their own that never meet, which is "
    "the most that towers could reach; 'stream' prepares the recipe's batches while the step runs, the rest repeats "
    "one batch. Efficiency is images/s over those of one tower, times the devices there really are. The shares are of "
    "the step's work, as TensorFlow's profiler saw it on one step, all towers together; 'waiting' is the share of time "
    "in which the step waited for its input."
)
