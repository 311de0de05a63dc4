"""Results of a race: statistics over seeds, fraction of the peak rate, and tables of race and framework comparison."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cifar_towers.benchmark import report_io
from cifar_towers.benchmark.framework_comparison import OURS, Competitor
from cifar_towers.benchmark.peak_flops import PeakFlops
from cifar_towers.reporting.sample import Sample

# Published runs on PyTorch: the 2025 CIFAR-10 speed record; its accuracy is the mean with TTA.
PUBLISHED = {"speednet94": {"steps": 243, "batch_size": 1536, "accuracy": 0.9401, "runs": 200}}
DURATIONS = {"compile": "compilation", "start": "start-up", "evaluate": "evaluation", "save": "saving"}
FORMATS = {  # of the table's columns
    "accuracy": "{:.2%}",
    "plain_accuracy": "{:.2%}",
    **dict.fromkeys(("training", *DURATIONS), "{:,.1f} s"),
    "images_per_sec": "{:,.0f}",
}


def accuracy_on_test(evaluations: Sequence[Mapping], tta: int) -> float:
    """Accuracy of the last evaluation on test, of the averaged weights if there are any."""
    on_test = [each for each in evaluations if (each["split"], each["tta"]) == ("test", tta)]
    scores = {each["weights"]: each["accuracy"] for each in on_test}
    return scores.get("ema", scores["raw"])


def summarize_race(seeds: Sequence[Mapping], work: Mapping, target: float) -> dict:
    """Statistics over the runs of a race, and how they compare with the machine's peak rate.

    `whole_training` is mean seconds of all steps: of the timed ones, plus the first of each kind, whose time counts as
    compilation, at the same rate.

    Args:
      seeds: as in race.json.
      work: kind of step -> `race.Work`.
    """
    by_type: Counter[str] = Counter()
    timed = 0  # operations of all steps but the first of each kind
    for steps, operations in work.values():
        by_type.update({name: steps * count for name, count in operations.items()})
        timed += (steps - 1) * sum(operations.values())
    total = by_type.total()
    stats = {name: Sample.of([_values(seed)[name] for seed in seeds])._asdict() for name in FORMATS}
    training = stats["training"]["mean"]
    whole_training = training * (total / timed if timed else 1.0)
    peaks = [PeakFlops(*rates) for seed in seeds for rates in seed["ceilings"]]
    peak = statistics.mean(each.convolution for each in peaks) if peaks else None
    return {
        "seeds": seeds,
        **stats,
        "whole_training": whole_training,
        "seconds_to_target": whole_training if stats["accuracy"]["mean"] >= target > 0 else None,
        "work": total,
        "operations": dict(by_type),
        "steps": sum(steps for steps, _ in work.values()),
        "ceilings": [each._asdict() for each in peaks],
        "ceiling": peak,
        "limit_seconds": total / peak / 1e9 if peak else None,
        "fraction_of_ceiling": timed / training / peak / 1e9 if peak else None,
    }


def _values(seed: Mapping) -> dict[str, float]:
    """What the table has of a seed."""
    phases = {phase: seed["seconds"].get(phase, 0.0) for phase in DURATIONS}
    return {**seed, **phases, "training": seed["step_seconds"]}


def publish_race(directory: Path, facts: Mapping, race: Mapping) -> None:
    """Prints the results over seeds, and writes them to race.json and race.txt."""
    report_io.publish(directory, "race", facts, race, [race_table(facts, race), conclude(facts, race)])


def publish_comparison(
    directory: Path, facts: Mapping, competitors: Sequence[Competitor], left_out: Mapping[str, str]
) -> None:
    """Prints the comparison of frameworks, and writes it to side_by_side.json and side_by_side.txt."""
    results = {"contestants": [each.as_json("measure") for each in competitors], "left_out": left_out}
    notes = [EXPLANATION, *(f"Left out: {name}: {reason}" for name, reason in left_out.items())]
    parts = [comparison_table(competitors), "\n".join(notes + _published_record(facts["model"], competitors))]
    report_io.publish(directory, "side_by_side", facts, results, parts)


def race_table(facts: Mapping, race: Mapping) -> str:
    """A line per seed, mean and standard deviation."""
    rows = [["seed", f"TTA {facts['tta']}", "no TTA", "training", *DURATIONS.values(), "images/s"]]
    lines = {f"{seed['seed']}{'*' * seed['reused']}": _values(seed) for seed in race["seeds"]}
    for statistic in ("mean", "std") if len(lines) > 1 else ("mean",):
        lines[statistic] = {name: race[name][statistic] for name in FORMATS}
    for label, values in lines.items():
        rows.append([label, *(form.format(values[name]) for name, form in FORMATS.items())])
    return report_io.format_table(rows)


def conclude(facts: Mapping, race: Mapping) -> str:
    """Seconds to the target, the run's operations and the fraction of the machine's peak rate."""
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
    accuracy = Sample(**race["accuracy"]).describe_percent()
    training = f"{race['whole_training']:,.1f} s of training"
    if not facts["target"]:
        return f"Accuracy: {accuracy}, after {training}"
    target = f"Seconds to {100 * facts['target']:.2f} %"
    if race["seconds_to_target"] is None:
        return f"{target}: not reached: {accuracy}, after {training}"
    return f"{target}: {training}, {accuracy}"


def comparison_table(competitors: Sequence[Competitor]) -> str:
    """A line per framework and precision, the fastest first; `ours/theirs` for equal numbers of devices."""
    ours = {(each.precision, each.devices): each.median for each in competitors if each.name == OURS}
    rows = [["framework", "precision", "devices", *competitors[0].headings(), "ours/theirs"]]
    for each in sorted(competitors, key=lambda each: (each.precision, -each.median)):
        ratio = "-" if each.name == OURS else f"{ours[each.precision, each.devices] / each.median:.2f}"
        rows.append([each.name, each.precision, str(each.devices), *each.cells(), ratio])
    return report_io.format_table(rows)


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
    "compares equal numbers of devices. TF_ENABLE_ONEDNN_OPTS is the same for all TensorFlow "
    "programs but keras-untuned, which leaves it to TensorFlow; every process has all cores."
)
