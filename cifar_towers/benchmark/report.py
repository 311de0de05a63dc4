"""The benchmark's report: a table, a recommendation, JSON, a plot and an HTML page; parts that other reports share."""

import io
import itertools
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cifar_towers import files
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, CaseResult
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.hardware import gpu_names
from cifar_towers.reporting.html_report import Picture, Section, Table, render_page
from cifar_towers.reporting.profiler import PARTS
from cifar_towers.reporting.run_logger import describe_machine
from cifar_towers.reporting.run_records import align_columns, format_rate
from cifar_towers.towers.placement import PLACEMENTS

INPUT_BOUND_WAITING = 0.05  # fraction of the time waiting for input from which the input is the bottleneck
MAX_LOSS = 0.05  # fraction of images/s lost to exchange or small batches before these are the bottleneck
SAME_RATE = 0.02  # rates this close to the best count as equal
COLORS = {"towers": "#0072b2", "mirrored": "#d55e00", NO_EXCHANGE: "#999999", KERAS: "#009e73"}  # colorblind-safe


def publish(directory: Path, metadata: Mapping, results: Sequence[CaseResult]) -> None:
    """Print the table and the conclusion, and write benchmark.json, benchmark.txt, benchmark.png and index.html."""
    picture, conclusion = plot(results, metadata), conclude(results, metadata)
    headings, *rows = _rows(results)
    packages = ", ".join(f"{name} {version}" for name, version in metadata["packages"].items())
    section = Section(
        "Results",
        conclusion,
        [[Picture(picture, "images per second of every case")]],
        [Table([dict(zip(headings, row, strict=True)) for row in rows], text_columns=3)],
        note=f"{EXPLANATION} Measured in {metadata['minutes']:.1f} minutes with {packages}.",
    )
    page = render_page(make_title(metadata), [section])
    as_json = [{"case": result.case._asdict(), **result.as_json("case")} for result in results]
    written = {"rows": as_json, "conclusion": conclusion}
    more: dict[str, str | bytes] = {"benchmark.png": picture, "index.html": page}
    write_report(directory, "benchmark", metadata, written, [table(results)], more, conclusion)


def table(results: Sequence[CaseResult]) -> str:
    """Return a table as aligned text with a line per case, the fastest of each precision first."""
    return align_columns(_rows(results), left=(0, 1, 2, 4))


def _rows(results: Sequence[CaseResult]) -> list[list[str]]:
    measured = [*results[0].cells(), "efficiency", *PARTS, "waiting", "compile"]
    rows = [["precision", "strategy", "placement", "towers", "input", *measured]]
    for result in sorted(results, key=lambda result: (result.case.precision, -result.median)):
        strategy, placement, towers, precision, source = result.case
        row = [precision, strategy, placement, str(towers), source, *result.cells().values()]
        row.append(f"{100 * result.efficiency:.1f} %" if result.efficiency else "-")
        row += [f"{100 * result.shares[part]:.1f} %" if result.shares else "-" for part in PARTS]
        row.append(f"{100 * result.waiting:.1f} %" if source == "stream" else "-")
        rows.append([*row, f"{result.compile_seconds:.0f} s"])
    return rows


def conclude(results: Sequence[CaseResult], metadata: Mapping) -> str:
    """Say in one sentence what bounds this machine, and which flags to use."""
    trainable = [result for result in results if result.case.trains]
    fastest = max(result.median for result in trainable)
    equal = [result for result in trainable if result.median >= (1 - SAME_RATE) * fastest]
    simplest_first = (*PLACEMENTS, UNPLACED)  # shared variables on the CPU to mirrored ones
    best = min(equal, key=lambda each: (simplest_first.index(each.case.placement), each.case.towers))
    case, bottleneck = best.case, _bottleneck(best, results, metadata["batch_size"])
    placed = "--strategy=mirrored" if case.strategy == "mirrored" else f"--variable_placement={case.placement}"
    flags = f"--num_gpus={case.towers} --precision={case.precision} {placed}"
    return f"This machine is bound by {bottleneck}: use {flags} ({format_rate(best.median)} images/s)."


def _bottleneck(best: CaseResult, results: Sequence[CaseResult], batch_size: int) -> str:
    """Name the bottleneck (input, exchange, a small batch per tower, or compute) and the measurements that show it."""
    same_precision = [result for result in results if result.case.precision == best.case.precision]
    for result in same_precision:
        if result.case.input == "stream" and result.waiting > INPUT_BOUND_WAITING and result.median < best.median:
            return (
                f"its input ({format_rate(result.median)} images/s with it; {result.case.towers} towers wait for it "
                f"{100 * result.waiting:.0f} % of the time)"
            )
    # independent towers are the upper bound: as many as the best case has, or any number of them if that is one
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


def plot(results: Sequence[CaseResult], metadata: Mapping) -> bytes:
    """Draw a panel per precision, with a bar and its spread per case and a dotted line for one tower, as PNG."""
    ordered = sorted(results, key=lambda result: (result.case.precision, result.case.towers, -result.median))
    by_precision = {key: list(group) for key, group in itertools.groupby(ordered, lambda each: each.case.precision)}
    heights = [len(shown) + 0.4 for shown in by_precision.values()]  # bars of equal height in all panels
    figure = Figure((9, 1.2 + 0.8 * len(heights) + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    for panel, (precision, shown) in zip(panels[:, 0], by_precision.items(), strict=True):
        _draw_bars(panel, shown)
        panel.set_ylim(len(shown) - 0.4, -0.6)
        panel.set_title(precision)
    figure.suptitle(
        f"{metadata['recipe']}, batches of {metadata['batch_size']:,}; {metadata['processor']}, {metadata['date']}"
    )
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
    panel.bar_label(bars, fmt=format_rate, padding=4, fontsize=8)
    one_tower = [result.median for result in results if result.case.trains and result.case[:3] == ("towers", "cpu", 1)]
    for median in one_tower:
        panel.axvline(median, color="black", linestyle=":", linewidth=1)
    dotted = "; dotted: one tower" if one_tower else ""
    panel.set_xlabel(f"images/s, median and {results[0].spread_name}{dotted}")
    panel.margins(x=0.12)
    panel.spines[["top", "right"]].set_visible(False)


def make_directory(directory: Path) -> None:
    """Make the directory for the results, before anything is measured."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"train_dir={directory} cannot be made: {error.strerror}") from error


def collect_metadata(recipe: TrainConfig, dataset: str) -> dict:
    """Return the recipe, machine and date of a measurement."""
    return {
        "recipe": recipe.name,
        "model": recipe.model,
        "batch_size": recipe.batch_size,
        "hard_example_pool": recipe.hard_example_pool,
        "dataset": dataset,
        "date": date.today().isoformat(),
        **describe_machine(),
        "gpus": gpu_names(),
    }


def make_title(metadata: Mapping) -> str:
    """Return `speed94: speednet94, batches of 1,024, cifar10; Abacus, 2 cores, 1 CPU; 2026-01-01`."""
    pool = metadata.get("hard_example_pool")
    subjects = [metadata["model"], f"batches of {metadata['batch_size']:,}", f"the hardest of {pool:,}" if pool else ""]
    subjects += [metadata["dataset"], metadata.get("precision", "")]
    machine = [metadata["processor"], f"{metadata['cores']} cores"]
    machine += [f"{metadata['devices']} {metadata['kind']}"] if "kind" in metadata else []
    machine += sorted(set(metadata.get("gpus", ())))
    return f"{metadata['recipe']}: {', '.join(filter(None, subjects))}; {', '.join(machine)}; {metadata['date']}"


def write_report(
    directory: Path,
    name: str,
    metadata: Mapping,
    results: Mapping,
    paragraphs: Sequence[str],
    extra_files: Mapping[str, str | bytes] = {},
    conclusion: str = "",
) -> None:
    """Print a report with `conclusion` last, and write it to <name>.txt, and metadata and results to <name>.json.

    `extra_files` are contents of further files, by name. If nothing can be written, the report has been printed.
    """
    names = f"in {directory}: {', '.join((f'{name}.txt', f'{name}.json', *extra_files))}"
    text = "\n\n".join(part for part in (make_title(metadata), *paragraphs, names, conclusion) if part)
    try:  # hours of measurements are written even if they cannot be printed
        print(f"\n{text}", flush=True)
    finally:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files.write_json(directory / f"{name}.json", {**metadata, **results})
            for file, content in {f"{name}.txt": text + "\n", **extra_files}.items():
                files.write_whole(directory / file, content)
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written ({error_text(error)}); the results are only printed above"
            ) from error


EXPLANATION = (
    "Every case makes the recipe's update, as in the middle of a run, on batches of the recipe's size. Only Keras "
    "'fit' differs: it uses momentum SGD and images augmented in advance. "
    "Images/s are the median over rounds after compilation. Each round runs all cases in a new order; n is rounds x "
    "timed steps per round. 'no exchange' means independent towers with variables of their own, an upper bound for "
    "towers. 'stream' prepares the recipe's batches while the step runs; the other cases repeat one batch. Efficiency "
    "is images/s over those of one tower times the physical devices. Shares cover the step's work, summed over towers, "
    "as TensorFlow's profiler measured it in one step. 'waiting' is the fraction of time in which the step waited for "
    "its input."
)
