"""Results of the benchmark as a table, a recommendation, JSON, a plot and an HTML page."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cifar_towers.benchmark import report_io
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, CaseResult
from cifar_towers.reporting import html_page
from cifar_towers.reporting.html_page import Picture, Section, Table
from cifar_towers.reporting.profiler import PARTS
from cifar_towers.towers.placement import PLACEMENTS

INPUT_BOUND_WAITING = 0.05  # fraction of the time waiting for input from which the input is the bottleneck
MAX_LOSS = 0.05  # fraction of images/s lost to exchange or small batches before these are the bottleneck
SAME_RATE = 0.02  # rates this close to the best count as equal
COLORS = {"towers": "#0072b2", "mirrored": "#d55e00", NO_EXCHANGE: "#999999", KERAS: "#009e73"}  # colorblind-safe


def publish(directory: Path, facts: Mapping, results: Sequence[CaseResult]) -> None:
    """Prints table and conclusion, and writes benchmark.json, benchmark.txt, benchmark.png and index.html."""
    picture, conclusion = plot(results, facts), conclude(results, facts)
    headings, *rows = _rows(results)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    section = Section(
        "Results",
        conclusion,
        [[Picture(picture, "images per second of every case")]],
        [Table(headings, rows, text_columns=3)],
        note=f"{EXPLANATION} Measured in {facts['minutes']:.0f} minutes with {packages}.",
    )
    page = html_page.render(report_io.make_title(facts), [section])
    as_json = {"rows": [_as_json(result) for result in results], "conclusion": conclusion}
    files = {"benchmark.png": picture, "index.html": page}
    report_io.publish(directory, "benchmark", facts, as_json, [table(results)], files, conclusion)


def _as_json(result: CaseResult) -> dict:
    return {"variation": result.case._asdict(), **result.as_json("case")}


def table(results: Sequence[CaseResult]) -> str:
    """Aligned text, one line per case, the fastest of each precision first."""
    return report_io.format_table(_rows(results), left=(0, 1, 2, 4))


def _rows(results: Sequence[CaseResult]) -> list[list[str]]:
    """The table's rows, below their headings."""
    measured = [*results[0].headings(), "efficiency", *PARTS, "waiting", "compile"]
    rows = [["precision", "strategy", "placement", "towers", "input", *measured]]
    for result in sorted(results, key=lambda result: (result.case.precision, -result.median)):
        case = result.case
        rows.append(
            [
                *(case.precision, case.strategy, case.placement, str(case.towers), case.input),
                *result.cells(),
                f"{100 * result.efficiency:.1f} %" if result.efficiency else "-",
                *(f"{100 * result.shares[part]:.1f} %" if result.shares else "-" for part in PARTS),
                f"{100 * result.waiting:.1f} %" if case.input == "stream" else "-",
                f"{result.compile_seconds:.0f} s",
            ]
        )
    return rows


def conclude(results: Sequence[CaseResult], facts: Mapping) -> str:
    """One sentence: this machine's bottleneck, and the flags to use."""
    trainable = [result for result in results if result.case.trains]
    fastest = max(result.median for result in trainable)
    equal = [result for result in trainable if result.median >= (1 - SAME_RATE) * fastest]
    simplest_first = (*PLACEMENTS, UNPLACED)  # shared variables on the CPU to mirrored ones
    best = min(equal, key=lambda each: (simplest_first.index(each.case.placement), each.case.towers))
    case, bottleneck = best.case, _bottleneck(best, results, facts["batch_size"])
    placed = "--strategy=mirrored" if case.strategy == "mirrored" else f"--variable_placement={case.placement}"
    flags = f"--num_gpus={case.towers} --precision={case.precision} {placed}"
    return f"This machine is bound by {bottleneck}: use {flags} ({best.median:,.0f} images/s)."


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
    """PNG: a panel per precision, one above the other, a bar with its spread per case, a dotted line for one tower."""
    ordered = sorted(results, key=lambda result: (result.case.precision, result.case.towers, -result.median))
    by_precision = {key: list(group) for key, group in itertools.groupby(ordered, lambda each: each.case.precision)}
    heights = [len(shown) + 0.4 for shown in by_precision.values()]  # bars of equal height in all panels
    figure = Figure((9, 1.2 + 0.8 * len(heights) + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    for panel, (precision, shown) in zip(panels[:, 0], by_precision.items(), strict=True):
        _draw_bars(panel, shown)
        panel.set_ylim(len(shown) - 0.4, -0.6)
        panel.set_title(precision)
    figure.suptitle(f"{facts['recipe']}, batches of {facts['batch_size']:,}; {facts['processor']}, {facts['date']}")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, facecolor="white")
    return buffer.getvalue()


def _draw_bars(panel: Axes, results: Sequence[CaseResult]) -> None:
    medians = [result.median for result in results]
    errors = [[abs(result.spread[end] - result.median) for result in results] for end in (0, 1)]
    bars = panel.barh(
        [f"{result.case.label()}  x {result.case.towers}" for result in results],
        medians,
        xerr=errors,
        color=[COLORS[result.case.strategy] for result in results],
        hatch=["//" if result.case.input == "stream" else "" for result in results],
        edgecolor="white",
    )
    panel.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=8)
    for result in results:
        if result.case[:3] == ("towers", "cpu", 1) and result.case.input == "constant":
            panel.axvline(result.median, color="black", linestyle=":", linewidth=1)
    panel.set_xlabel(f"images/s, median and {results[0].spread_of}; dotted: one tower")
    panel.margins(x=0.12)
    panel.spines[["top", "right"]].set_visible(False)


EXPLANATION = (
    "Every case makes the same update from the same batch of the recipe's size, as in the middle of a run. "
    "Images/s are the median over rounds, each of which runs all cases in a new order, after compilation; n is rounds "
    "x timed steps per round. 'no exchange' are independent towers with variables of their own, an upper bound for "
    "towers. 'stream' prepares the recipe's batches while the step runs; the other cases repeat one batch. Efficiency "
    "is images/s over those of one tower times the physical devices. The shares are of the step's work, summed over "
    "towers, as TensorFlow's profiler measured it in one step. 'waiting' is the fraction of time in which the step "
    "waited for its input."
)
