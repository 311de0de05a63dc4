"""Results of a race: statistics over seeds, fraction of the peak rate, and tables of race and framework comparison."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from cifar_towers.benchmark import report_io
from cifar_towers.benchmark.framework_comparison import OURS, Comparison, Competitor
from cifar_towers.benchmark.peak_flops import PeakFlops
from cifar_towers.reporting.phase_timer import STEP_PHASES

# Published runs on PyTorch: the 2025 CIFAR-10 speed record; its accuracy is the mean with TTA.
PUBLISHED = {"speednet94": {"steps": 243, "batch_size": 1536, "accuracy": 0.9401, "runs": 200}}
PERCENTAGES = {"accuracy": "TTA {tta}", "plain_accuracy": "no TTA"}  # of a seed -> heading
DURATIONS = {"compile": "compilation", "start": "start-up", "evaluate": "evaluation", "save": "saving"}


@dataclasses.dataclass
class SeedResult:
    """One seed's training."""

    seed: int
    reused: bool  # trained by an earlier command
    revision: str  # of the code that trained it
    seconds: dict[str, float]  # by phase
    images_per_sec: float
    accuracy: float  # on test, with the recipe's TTA
    plain_accuracy: float  # on test, without TTA
    ceilings: list[PeakFlops]  # of the machine, before and after it

    @property
    def step_seconds(self) -> float:
        """Seconds of all steps with input and reporting, without compilation."""
        return sum(self.seconds.get(phase, 0.0) for phase in STEP_PHASES)


def accuracy_on_test(evaluations: Sequence[Mapping], tta: int) -> float:
    """Accuracy of the last evaluation on test, of the averaged weights if there are any."""
    on_test = [each for each in evaluations if (each["split"], each["tta"]) == ("test", tta)]
    scores = {each["weights"]: each["accuracy"] for each in on_test}
    return scores.get("ema", scores["raw"])


def summarize_race(results: Sequence[SeedResult], work: int, timed_work: int, target: float) -> dict:
    """Statistics of a race with `work` operations a run, `timed_work` without steps whose time counts as compilation.

    `whole_training` is mean seconds of all steps: of the timed ones, plus the first of each kind at the same rate.
    """
    rates = [peak.convolution for result in results for peak in result.ceilings]
    training = [result.step_seconds for result in results]
    durations = {name: _stats([result.seconds.get(name, 0.0) for result in results]) for name in DURATIONS}
    accuracy = _stats([result.accuracy for result in results])
    peak = statistics.mean(rates) if rates else None
    whole_training = statistics.mean(training) * (work / timed_work if timed_work else 1.0)
    return {
        "seeds": [dataclasses.asdict(result) | {"step_seconds": result.step_seconds} for result in results],
        "accuracy": accuracy,
        "plain_accuracy": _stats([result.plain_accuracy for result in results]),
        "training": _stats(training),
        "whole_training": whole_training,
        **durations,
        "images_per_sec": _stats([result.images_per_sec for result in results]),
        "seconds_to_target": whole_training if accuracy["mean"] >= target > 0 else None,
        "work": work,
        "ceilings": [peak._asdict() for result in results for peak in result.ceilings],
        "ceiling": peak,
        "limit_seconds": work / peak / 1e9 if peak else None,
        "fraction_of_ceiling": timed_work / statistics.mean(training) / peak / 1e9 if peak else None,
    }


def _stats(values: Sequence[float]) -> dict:
    """Mean, sample standard deviation (None for one value) and number of values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": std, "n": len(values)}


def publish_race(directory: Path, facts: Mapping, race: Mapping) -> None:
    """Prints the results over seeds, and writes them to race.json and race.txt."""
    report_io.publish(directory, "race", {**facts, **race}, [_title(facts), race_text(facts, race)])


def publish_comparison(directory: Path, facts: Mapping, comparison: Comparison) -> None:
    """Prints the comparison of frameworks, and writes it to side_by_side.json and side_by_side.txt."""
    rows = [
        dataclasses.asdict(each) | {"median": each.median, each.spread_of: each.spread}
        for each in comparison.competitors
    ]
    results = {**facts, "contestants": rows, "left_out": comparison.left_out}
    report_io.publish(directory, "side_by_side", results, [_title(facts), comparison_text(facts, comparison)])


def _title(facts: Mapping) -> str:
    pool = f", the hardest of {facts['hard_example_pool']:,}" if facts["hard_example_pool"] else ""
    batches = f"batches of {facts['batch_size']:,}{pool}"
    return report_io.make_title(facts, facts["model"], batches, facts["dataset"], facts["precision"])


def race_text(facts: Mapping, race: Mapping) -> str:
    """A line per seed, mean and standard deviation, and the conclusion."""
    percentages = [heading.format(tta=facts["tta"]) for heading in PERCENTAGES.values()]
    rows = [["seed", *percentages, "training", *DURATIONS.values(), "images/s"]]
    for seed in race["seeds"]:
        seconds = [seed["step_seconds"], *(seed["seconds"].get(name, 0.0) for name in DURATIONS)]
        label = f"{seed['seed']}{'*' * seed['reused']}"
        rows.append(_race_row(label, [seed[name] for name in PERCENTAGES], seconds, seed["images_per_sec"]))
    for statistic in ("mean", "std"):
        if race["accuracy"][statistic] is not None:
            fractions = [race[name][statistic] for name in PERCENTAGES]
            seconds = [race[name][statistic] for name in ("training", *DURATIONS)]
            rows.append(_race_row(statistic, fractions, seconds, race["images_per_sec"][statistic]))
    return "\n\n".join([report_io.format_table(rows, left=(0,)), _conclusion(facts, race)])


def _race_row(label: str, fractions: Sequence[float], seconds: Sequence[float], images_per_sec: float) -> list[str]:
    percentages = [f"{100 * fraction:.2f} %" for fraction in fractions]
    return [label, *percentages, *(f"{each:,.1f} s" for each in seconds), f"{images_per_sec:,.0f}"]


def _conclusion(facts: Mapping, race: Mapping) -> str:
    operations = sorted(race["operations"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {100 * count / race['work']:.1f} %" for kind, count in operations)
    lines = [
        f"{_verdict(facts, race)}: timed steps, plus the first of each kind at the same rate, which is also in the "
        f"{race['compile']['mean']:,.1f} s of compilation.",
        f"Operations of a run, counted in its graph: {race['work'] / 1e9:,.0f} GFLOP in {race['steps']:,} steps "
        f"({shares}); elementwise operations are not counted.",
    ]
    if race["ceiling"]:
        convolutions = ", ".join(f"{peak['convolution']:,.0f}" for peak in race["ceilings"])
        products = ", ".join(f"{peak['matmul']:,.0f}" for peak in race["ceilings"])
        lines.append(
            f"This machine's peak: {race['ceiling']:,.0f} GFLOP/s (3x3 forward convolutions before and after each "
            f"seed: {convolutions}; matrix products: {products}). A run at the peak takes "
            f"{race['limit_seconds']:,.1f} s; training ran at {100 * race['fraction_of_ceiling']:.1f} % of it."
        )
    earlier = [f"{seed['seed']} (revision {seed['revision']})" for seed in race["seeds"] if seed["reused"]]
    if earlier:
        lines.append(f"* run by an earlier command: seed {', '.join(earlier)}; --overwrite runs all again.")
    return "\n".join(lines)


def _verdict(facts: Mapping, race: Mapping) -> str:
    """Seconds of training to the target accuracy, or the accuracy that was reached."""
    mean, std, n = race["accuracy"].values()
    accuracy = f"mean {100 * mean:.2f} %, " + (f"std {100 * std:.2f}, " if std is not None else "") + f"n={n}"
    training = f"{race['whole_training']:,.1f} s of training"
    if not facts["target"]:
        return f"Accuracy: {accuracy}, after {training}"
    target = f"Seconds to {100 * facts['target']:.2f} %"
    if race["seconds_to_target"] is None:
        return f"{target}: not reached: {accuracy}, after {training}"
    return f"{target}: {training} ({accuracy})"


def comparison_text(facts: Mapping, comparison: Comparison) -> str:
    """The comparison of frameworks as a table, and how to read it."""
    competitors = comparison.competitors
    ours = {(each.precision, each.devices): each.median for each in competitors if each.name == OURS}
    rows = [["framework", "precision", "devices", "images/s", competitors[0].spread_of, "n", "ours/theirs"]]
    for each in sorted(competitors, key=lambda each: (each.precision, -each.median)):
        low, high = each.spread
        ratio = "-" if each.name == OURS else f"{ours[each.precision, each.devices] / each.median:.2f}"
        rates = [f"{each.median:,.0f}", f"{low:,.0f}-{high:,.0f}"]
        rows.append([each.name, each.precision, str(each.devices), *rates, each.n, ratio])
    notes = [EXPLANATION, *(f"Left out: {name}: {reason}" for name, reason in comparison.left_out.items())]
    notes += _published_record(facts["model"], competitors)
    return "\n\n".join([report_io.format_table(rows, left=(0,)), "\n".join(notes)])


def _published_record(model: str, competitors: Sequence[Competitor]) -> list[str]:
    """Seconds that the published recipe would take at the rate of the fastest PyTorch peer."""
    pytorch = [each for each in competitors if each.name.startswith("pytorch")]
    record = PUBLISHED.get(model)
    if not record or not pytorch:
        return []
    best = max(pytorch, key=lambda each: each.median)
    steps, batch_size = record["steps"], record["batch_size"]
    return [
        f"The published recipe on PyTorch, computed and not run: its {steps} steps of {batch_size:,} at "
        f"the {best.median:,.0f} images/s of {best.name}, {best.precision}, take "
        f"{steps * batch_size / best.median:,.0f} s, without input, to "
        f"its published mean of {100 * record['accuracy']:.2f} % (n={record['runs']})."
    ]


EXPLANATION = (
    "Medians over rounds, each of which runs all frameworks in another order; n is rounds x timed steps per round. "
    f"{OURS} is a whole training by scripts/train.py at full image size, with input and summaries, without its "
    "compiling step; the others make bare steps over the same batches (the tutorial with its own input). All make the "
    "step of most of a run, with the whitening's bias frozen. Devices are GPUs, or the CPU as one; ours/theirs "
    "compares equal numbers of devices. TF_ENABLE_ONEDNN_OPTS is the same for all TensorFlow programs; every process "
    "has all cores."
)
