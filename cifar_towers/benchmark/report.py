"""Results of the benchmark as a table, a recommendation, JSON, a plot and an HTML page."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cifar_towers.benchmark import report_io
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase
from cifar_towers.benchmark.round_stats import CaseResult
from cifar_towers.reporting import html_page
from cifar_towers.reporting.html_page import Picture, Section, Table
from cifar_towers.reporting.profiler import PARTS
from cifar_towers.towers.communication import Prediction
from cifar_towers.towers.placement import PLACEMENTS

INPUT_BOUND_WAITING = 0.05  # fraction of the time waiting for input from which the input is the bottleneck
MAX_LOSS = 0.05  # fraction of images/s lost to exchange or small batches before these are the bottleneck
SAME_RATE = 0.02  # rates this close to the best count as equal
COLORS = {"towers": "#0072b2", "mirrored": "#d55e00", NO_EXCHANGE: "#999999", KERAS: "#009e73"}  # colorblind-safe


def publish(directory: Path, facts: Mapping, results: Sequence[CaseResult]) -> None:
    """Prints table and conclusion, and writes benchmark.json, benchmark.txt, benchmark.png and index.html."""
    picture, conclusion = plot(results, facts), conclude(results, facts)
    as_json = {"rows": [_as_json(result) for result in results], "conclusion": conclusion}
    files = {"benchmark.png": picture, "index.html": make_page(results, facts, picture)}
    report_io.publish(directory, "benchmark", facts | as_json, [_title(facts), table(results)], files, conclusion)


def publish_prediction(
    directory: Path, facts: Mapping, result: CaseResult, predictions: Sequence[Prediction], link_gb_per_s: float
) -> None:
    """Prints one tower's measurement and the predictions from it, and writes prediction.json and prediction.txt."""
    links = f"links of {link_gb_per_s:g} GB/s each way, no overlap of compute and transfers"
    predicted = f"On GPUs as fast as one tower here, {links}:\n{prediction_table(predictions)}"
    as_json = {
        "measured": _as_json(result),
        "link_gb_per_s": link_gb_per_s,
        "predictions": [prediction._asdict() for prediction in predictions],
    }
    report_io.publish(directory, "prediction", facts | as_json, [_title(facts), table([result]), predicted])


def _title(facts: Mapping) -> str:
    return report_io.make_title(facts, facts["model"], f"batches of {facts['batch_size']:,}", facts["dataset"])


def _as_json(result: CaseResult) -> dict:
    fields = dataclasses.asdict(result)
    del fields["case"]
    return {"variation": result.case._asdict(), **fields, "median": result.median}


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """Aligned text, one line per exchange and number of devices; times in milliseconds."""
    rows = [("variables", "devices", "batch", "compute ms", "transfer ms", "step ms", "images/s", "efficiency")]
    for exchange, count, batch, *times, rate, efficiency in predictions:
        milliseconds = [f"{1000 * seconds:.2f}" for seconds in times]
        rows.append((exchange, str(count), f"{batch:,}", *milliseconds, f"{rate:,.0f}", f"{efficiency:.1%}"))
    return report_io.format_table(rows, left=(0,))


def table(results: Sequence[CaseResult]) -> str:
    """Aligned text, one line per case, the fastest of each precision first."""
    rows = [_headings(results), *(_cells(result) for result in _sorted(results))]
    return report_io.format_table(rows, left=(0, 1, 2, 4))


def _sorted(results: Sequence[CaseResult]) -> list[CaseResult]:
    return sorted(results, key=lambda result: (result.case.precision, -result.median))


def _headings(results: Sequence[CaseResult]) -> tuple[str, ...]:
    return (
        "precision", "strategy", "placement", "towers", "input", "images/s", results[0].spread_of, "n", "efficiency",
        *PARTS, "waiting", "compile",
    )  # fmt: skip


def _cells(result: CaseResult) -> list[str]:
    case, (low, high) = result.case, result.spread
    return [
        case.precision,
        case.strategy,
        case.placement,
        str(case.towers),
        case.input,
        f"{result.median:,.0f}",
        f"{low:,.0f}-{high:,.0f}",
        result.n,
        f"{100 * result.efficiency:.1f} %" if result.efficiency else "-",
        *(f"{100 * result.shares[part]:.1f} %" if result.shares else "-" for part in PARTS),
        f"{100 * result.waiting:.1f} %" if case.input == "stream" else "-",
        f"{result.compile_seconds:.0f} s",
    ]


def conclude(results: Sequence[CaseResult], facts: Mapping) -> str:
    """One sentence: this machine's bottleneck, and the flags to use."""
    trainable = [result for result in results if result.case.trains]
    fastest = max(result.median for result in trainable)
    # of the cases as fast as the fastest, the simplest: shared variables, on the CPU, few towers
    equal = [result for result in trainable if result.median >= (1 - SAME_RATE) * fastest]
    best = min(equal, key=lambda result: _complexity(result.case))
    case, bottleneck = best.case, _bottleneck(best, results, facts["batch_size"])
    placed = "--strategy=mirrored" if case.strategy == "mirrored" else f"--variable_placement={case.placement}"
    flags = f"--num_gpus={case.towers} --precision={case.precision} {placed}"
    return f"This machine is bound by {bottleneck}: use {flags} ({best.median:,.0f} images/s)."


def _complexity(case: BenchmarkCase) -> tuple:
    return case.strategy != "towers", (*PLACEMENTS, UNPLACED).index(case.placement), case.towers


def _bottleneck(best: CaseResult, results: Sequence[CaseResult], batch_size: int) -> str:
    """Input, exchange, too small a batch per tower, or compute, with the measurements that show it."""
    same_precision = [result for result in results if result.case.precision == best.case.precision]
    for result in same_precision:
        if result.case.input == "stream" and result.waiting > INPUT_BOUND_WAITING and result.median < best.median:
            return (
                f"its input ({result.median:,.0f} images/s with it; {result.case.towers} towers wait for it "
                f"{100 * result.waiting:.0f} % of the time)"
            )
    # independent towers are the upper bound: as many as the best case has, or, if that is one, any number of them
    independent = [result for result in same_precision if result.case.strategy == NO_EXCHANGE]
    if best.case.towers > 1:
        independent = [result for result in independent if result.case.towers == best.case.towers]
    bound = max(independent, key=lambda result: result.median, default=None)
    if bound and best.median < (1 - MAX_LOSS) * bound.median:
        lost = 100 * (1 - best.median / bound.median)
        return f"the exchange between towers ({lost:.0f} % slower than {bound.case.towers} towers that never meet)"
    if bound and 0 < bound.efficiency < 1 - MAX_LOSS:
        return (
            f"too small a batch per tower ({batch_size // bound.case.towers} images: {bound.case.towers} towers that "
            f"never meet reach {100 * bound.efficiency:.0f} % of what their devices do with a whole batch)"
        )
    if not best.shares:
        return "compute"
    share = best.shares["forward"] + best.shares["backward"]
    return f"compute ({100 * share:.0f} % of the work is forward and backward)"


def plot(results: Sequence[CaseResult], facts: Mapping) -> bytes:
    """PNG: a panel per precision, a bar with its spread per case, and a dotted line for one tower."""
    ordered = sorted(results, key=lambda result: (result.case.precision, result.case.towers, -result.median))
    by_precision = {key: list(group) for key, group in itertools.groupby(ordered, lambda each: each.case.precision)}
    most_bars = max(map(len, by_precision.values()))
    top = max(result.spread[1] for result in results)
    figure = Figure((7.2 * len(by_precision), 1.6 + 0.3 * most_bars), layout="constrained")
    panels = figure.subplots(1, len(by_precision), squeeze=False)
    for panel, (precision, shown) in zip(panels[0], by_precision.items(), strict=True):
        _draw_panel(panel, shown, top)
        panel.set_ylim(most_bars - 0.4, -0.6)  # bars of equal height in all panels
        panel.set_title(precision)
    figure.suptitle(f"{facts['recipe']}, batches of {facts['batch_size']:,}; {facts['processor']}, {facts['date']}")
    return report_io.to_png(figure)


def _draw_panel(panel: Axes, results: Sequence[CaseResult], top: float) -> None:
    for position, result in enumerate(results):
        low, high = result.spread
        panel.barh(
            position, result.median, xerr=[[result.median - low], [high - result.median]], height=0.75,
            color=COLORS[result.case.strategy], ecolor="#444444", edgecolor="white",
            hatch="//" if result.case.input == "stream" else "",
        )  # fmt: skip
        panel.text(high + 0.015 * top, position, f"{result.median:,.0f}", va="center", color="#222222", fontsize=8)
        if result.efficiency and result.case[:3] == ("towers", "cpu", 1) and result.case.input == "constant":
            panel.axvline(result.median, color="#222222", linestyle=":", linewidth=1)
    labels = [f"{result.case.label()}  x {result.case.towers}" for result in results]
    panel.set_yticks(range(len(results)), labels, fontsize=9)
    panel.set_xlim(0, 1.12 * top)
    panel.set_xlabel(f"images/s, median and {results[0].spread_of}; dotted: one tower")
    panel.spines[["top", "right"]].set_visible(False)


def make_page(results: Sequence[CaseResult], facts: Mapping, picture: bytes) -> str:
    """One self-contained HTML file."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    section = Section(
        "Results",
        conclude(results, facts),
        [[Picture(picture, "images per second of every case")]],
        [Table(_headings(results), [_cells(result) for result in _sorted(results)], text_columns=3)],
        note=f"{EXPLANATION} Measured in {facts['minutes']:.0f} minutes with {packages}.",
    )
    return html_page.render(_title(facts), [section])


EXPLANATION = (
    "Every case makes the same update from the same batch of the recipe's size, as in the middle of a run. "
    "Images/s are the median over rounds, each of which runs all cases in a new order, after compilation; n is rounds "
    "x timed steps per round. 'no exchange' are independent towers with variables of their own, an upper bound for "
    "towers. 'stream' prepares the recipe's batches while the step runs; the other cases repeat one batch. Efficiency "
    "is images/s over those of one tower times the physical devices. The shares are of the step's work, summed over "
    "towers, as TensorFlow's profiler measured it in one step. 'waiting' is the fraction of time in which the step "
    "waited for its input."
)
