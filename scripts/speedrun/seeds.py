"""A recipe timed over seeds, against the peak rate of this machine; then the comparison with other frameworks."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from cifar_towers import files
from cifar_towers.benchmark import report
from cifar_towers.config import TrainConfig, parse_seeds, schedules
from cifar_towers.config.train_config import split_names
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.devices import resolve_precision, setup_towers
from cifar_towers.errors import UsageError, error_text
from cifar_towers.hardware import gpu_names
from cifar_towers.reporting.phase_timer import STEP_PHASES
from cifar_towers.reporting.run_records import align_columns
from cifar_towers.reporting.sample import Sample
from cifar_towers.towers import Tower
from cifar_towers.training import build
from scripts.speedrun import comparison, operations, peak
from scripts.speedrun.settings import SpeedrunConfig
from scripts.speedrun.training import run_training

PEAKS = "peaks.json"  # in a seed's directory: the peak rates before and after its training
SAME_MACHINE = ("processor", "cores", "gpus", "precision", "onednn")  # of environment.json, equal for all seeds
UNCHECKED = {"recipe", "train_dir", "data_dir", "overwrite"}  # settings in which the seeds of a speedrun may differ
ONE_TOWER: dict[str, Any] = {
    "num_gpus": 1,
    "strategy": "towers",
    "parallelism": "data",
    "micro_batches": 1,
    "tower_shares": "",
    "all_reduce": "auto",
    "variable_placement": "cpu",
    "gradient_device": "variable",
    "gpu_memory_growth": True,
}
DURATIONS = {"compile": "compilation", "start": "start-up", "evaluate": "evaluation", "save": "saving"}
FORMATS = {  # of the table's columns
    "accuracy": "{:.2%}",
    "plain_accuracy": "{:.2%}",
    **dict.fromkeys(("training", *DURATIONS), "{:,.1f} s"),
    "images_per_sec": "{:,.0f}",
}
# (image size, parameter groups that the step updates) -> (number of such steps, operations of one by type)
Work = Mapping[tuple[int, tuple[str, ...]], tuple[int, dict[str, int]]]


def run_speedrun(config: SpeedrunConfig, source: sources.Source) -> None:
    """Train the seeds that are not yet trained, then compare frameworks; print and write the results of both."""
    report.make_directory(config.directory)
    gpus = gpu_names()  # before `setup_towers` hides all GPUs but one
    num_towers = config.recipe.num_gpus or (config.recipe.default_num_towers(len(gpus))[0] if gpus else 0)
    num_devices = min(num_towers, len(gpus)) or 1
    precision, _ = resolve_precision(config.recipe.precision, "GPU" if gpus else "CPU")
    towers = setup_towers(dataclasses.replace(config.recipe, **ONE_TOWER))  # all cores for one operation
    source, dataset = build.load_data(config.recipe, source)
    if source.banner:
        print(source.banner)
    recipe = dataclasses.replace(config.recipe, num_gpus=num_towers, dataset=dataset.name)
    config = dataclasses.replace(config, recipe=recipe)
    more = {"gpus": gpus, "precision": precision, "tta": recipe.tta, "target": config.target}
    metadata = report.collect_metadata(recipe, dataset.name) | more
    if config.seeds:
        work = count_work(recipe, towers, precision, dataset.train)
        seeds = _train_seeds(config, {**metadata, "gpus": gpus[:num_towers]}, num_devices)
        publish(config.directory, metadata, summarize(seeds, work, config.target))
    if config.rounds:
        precisions = list(dict.fromkeys(split_names(config.precisions) or [precision, "float32"]))
        bare = {"hard_example_pool": 0}  # the bare step, without selecting examples
        config = dataclasses.replace(config, recipe=dataclasses.replace(recipe, **bare))
        results, left_out = comparison.compare_frameworks(config, precisions, dataset, num_devices)
        comparison.publish(config.directory, metadata | bare, results, left_out)


def count_work(recipe: TrainConfig, towers: Sequence[Tower], precision: str, train: Split) -> Work:
    """Count the operations of a recipe's run in the graph of one tower's step, for each kind of step.

    Raises:
      UsageError: the operations cannot be counted in the graph.
    """
    batches = build.make_batches(recipe, train)
    length = recipe.run_length(batches.steps_per_epoch)
    image_size_at = schedules.ImageSizeSchedule(recipe.image_size_schedule, recipe.image_size).at(length)
    one_tower = dataclasses.replace(recipe, **ONE_TOWER)
    state, train_step, _ = build.make_training(one_tower, towers[:1], precision, train, length)
    rates_at = state.optimizer.learning_rates
    kinds = Counter((image_size_at(step), tuple(rates_at(step))) for step in range(length.last))
    batch = batches.stream(0, 1).element_spec
    work = {}
    for (image_size, groups), steps in kinds.items():
        rates = dict.fromkeys(groups, tf.TensorSpec([], tf.float32))
        function = train_step.get_concrete_function(batch, rates, image_size)
        try:
            work[image_size, groups] = steps, operations.count(function)
        except ValueError as error:
            raise UsageError(
                f"model={recipe.model} cannot be timed against the peak, as its operations cannot be counted "
                f"({error_text(error)}); --seeds= runs only the comparison of frameworks"
            ) from error
    return work


def _train_seeds(config: SpeedrunConfig, metadata: Mapping, num_devices: int) -> list[dict]:
    """Train one run per seed, and measure the peak before, between and after the runs."""
    results = []
    before = peak.measure(metadata["precision"], gpus=num_devices)
    for seed in parse_seeds(config.seeds):
        train_dir = config.directory / f"seed{seed}"
        recipe = dataclasses.replace(config.recipe, seed=seed, train_dir=str(train_dir), eval_every_epochs=0.0)
        _check_same_conditions(train_dir, recipe, metadata)
        earlier = {} if recipe.overwrite else files.read_json_if_any(train_dir / files.RESULT)
        result = run_training(recipe)
        if not result["images_per_sec"]:
            raise UsageError("too few steps to time; give more --max_steps or --epochs")
        reused = result == earlier
        if reused:
            peaks = files.read_json_if_any(train_dir / PEAKS).get("peaks", [])
        else:
            after = peak.measure(metadata["precision"], gpus=num_devices)
            peaks, before = [before, after], after
            with files.BestEffortWrites(train_dir / PEAKS):
                files.write_json(train_dir / PEAKS, {"peaks": peaks})
        environment = files.read_json_if_any(train_dir / files.ENVIRONMENT)
        results.append(
            {
                "seed": seed,
                "reused": reused,  # trained by an earlier command
                "revision": environment.get("git_revision", "unknown"),
                "seconds": result["seconds"],
                "step_seconds": sum(result["seconds"].get(phase, 0.0) for phase in STEP_PHASES),
                "images_per_sec": result["images_per_sec"],
                "accuracy": accuracy_on_test(result["evaluations"], recipe.tta),
                "plain_accuracy": accuracy_on_test(result["evaluations"], 0),
                "peaks": peaks,
            }
        )
    return results


def _check_same_conditions(train_dir: Path, recipe: TrainConfig, metadata: Mapping) -> None:
    """Refuse an existing run with other settings or of another machine.

    All seeds of a speedrun need the same conditions, although a training may be resumed with another number of towers.
    """
    if recipe.overwrite:
        return
    open_values = {"variable_placement": "", "micro_batches": 0}  # in whose place config.json has what the run chose
    left_open = {name for name, value in open_values.items() if getattr(recipe, name) == value}
    settings = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in UNCHECKED | left_open}
    machine = {name: metadata[name] for name in SAME_MACHINE}
    differing = []
    for file, expected in ((files.CONFIG, settings), (files.ENVIRONMENT, machine)):
        found = files.read_json_if_any(train_dir / file)
        differing += [
            f"{name} {found[name]} -> {value}"
            for name, value in expected.items()
            if name in found and value not in (found[name], "auto")
        ]
    if differing:
        raise UsageError(
            f"{train_dir} has other settings or another machine ({', '.join(differing)}); "
            "give those settings, another --train_dir, or --overwrite to run all seeds again"
        )


def accuracy_on_test(evaluations: Sequence[Mapping], tta: int) -> float:
    """Return the last accuracy on the test set, of the averaged weights if there are any."""
    on_test = [each for each in evaluations if (each["split"], each["tta"]) == ("test", tta)]
    scores = {each["weights"]: each["accuracy"] for each in on_test}
    return scores["ema" if "ema" in scores else "raw"]


def summarize(seeds: Sequence[Mapping], work: Work, target: float) -> dict:
    """Compute statistics over the seeds, and the rate of their training as a fraction of the peak.

    `whole_training` is the mean duration of all steps in seconds. The first step of each kind is not timed, as its time
    counts as compilation; it is added at the rate of the others.
    """
    by_type: Counter[str] = Counter()
    timed = 0  # operations of all steps except the first of each kind
    for steps, counts in work.values():
        by_type.update({name: steps * count for name, count in counts.items()})
        timed += (steps - 1) * sum(counts.values())
    total = by_type.total()
    stats = {name: Sample.of([_values(seed)[name] for seed in seeds])._asdict() for name in FORMATS}
    training = stats["training"]["mean"]
    whole_training = training * (total / timed if timed else 1.0)
    peaks = [rates for seed in seeds for rates in seed["peaks"]]
    mean_peak = statistics.mean(rates["convolution"] for rates in peaks) if peaks else None
    return {
        "seeds": seeds,
        **stats,
        "whole_training": whole_training,
        "seconds_to_target": whole_training if stats["accuracy"]["mean"] >= target > 0 else None,
        "work": total,
        "operations": dict(by_type),
        "steps": sum(steps for steps, _ in work.values()),
        "peaks": peaks,
        "peak": mean_peak,
        "seconds_at_peak": total / mean_peak / 1e9 if mean_peak else None,
        "fraction_of_peak": timed / training / mean_peak / 1e9 if mean_peak else None,
    }


def _values(seed: Mapping) -> dict[str, Any]:
    """Return the values of a seed by column of the table."""
    phases = {phase: seed["seconds"].get(phase, 0.0) for phase in DURATIONS}
    return {**seed, **phases, "training": seed["step_seconds"]}


def publish(directory: Path, metadata: Mapping, summary: Mapping) -> None:
    """Print the results over seeds, and write them to speedrun.json and speedrun.txt."""
    parts = [format_seeds(metadata, summary), conclude(metadata, summary)]
    report.write_report(directory, "speedrun", metadata, summary, parts)


def format_seeds(metadata: Mapping, summary: Mapping) -> str:
    """Return a table with a line per seed, their mean and standard deviation."""
    rows = [["seed", f"TTA {metadata['tta']}", "no TTA", "training", *DURATIONS.values(), "images/s"]]
    lines = {f"{seed['seed']}{'*' * seed['reused']}": _values(seed) for seed in summary["seeds"]}
    for statistic in ("mean", "std") if len(lines) > 1 else ("mean",):
        lines[statistic] = {name: summary[name][statistic] for name in FORMATS}
    for label, values in lines.items():
        rows.append([label, *(form.format(values[name]) for name, form in FORMATS.items())])
    return align_columns(rows)


def conclude(metadata: Mapping, summary: Mapping) -> str:
    """Say in sentences how long the target took, the number of operations, and the fraction of the peak."""
    counts = sorted(summary["operations"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {100 * count / summary['work']:.1f} %" for kind, count in counts)
    lines = [
        f"{_verdict(metadata, summary)}. It covers all steps; the first of each kind counts at the rate of the others, "
        f"and its time is also in the {summary['compile']['mean']:,.1f} s of compilation.",
        f"Operations of a run, counted in its graph: {summary['work'] / 1e9:,.0f} GFLOP in {summary['steps']:,} steps "
        f"({shares}); elementwise operations are not counted.",
    ]
    if summary["peak"]:
        convolutions = ", ".join(f"{rates['convolution']:,.0f}" for rates in summary["peaks"])
        products = ", ".join(f"{rates['matmul']:,.0f}" for rates in summary["peaks"])
        lines.append(
            f"This machine's peak: {summary['peak']:,.0f} GFLOP/s (3x3 forward convolutions before and after each "
            f"seed: {convolutions}; matrix products: {products}). A run at the peak takes "
            f"{summary['seconds_at_peak']:,.1f} s; training ran at {100 * summary['fraction_of_peak']:.1f} % of it."
        )
    earlier = [f"{seed['seed']} (revision {seed['revision']})" for seed in summary["seeds"] if seed["reused"]]
    if earlier:
        lines.append(f"* trained by an earlier command: seed {', '.join(earlier)}; --overwrite trains all again.")
    return "\n".join(lines)


def _verdict(metadata: Mapping, summary: Mapping) -> str:
    """Return the seconds of training to the target accuracy, or else the accuracy that was reached."""
    accuracy = Sample(**summary["accuracy"]).describe_percent()
    training = f"{summary['whole_training']:,.1f} s of training"
    if not metadata["target"]:
        return f"Accuracy: {accuracy}, after {training}"
    target = f"Seconds to {100 * metadata['target']:.2f} %"
    if summary["seconds_to_target"] is None:
        return f"{target}: not reached: {accuracy}, after {training}"
    return f"{target}: {training}, {accuracy}"
