"""Times a recipe over seeds, against the peak rate of this machine, and compares its step with other frameworks."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from cifar_towers import files
from cifar_towers.benchmark import operations, peak_flops, processes, race_results
from cifar_towers.benchmark.framework_comparison import compare_frameworks
from cifar_towers.benchmark.report_io import environment_facts, make_directory
from cifar_towers.benchmark.settings import SpeedrunConfig
from cifar_towers.config import TrainConfig, parse_seeds, schedules
from cifar_towers.config.settings import split_names
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError, error_text
from cifar_towers.hardware import gpu_names
from cifar_towers.reporting.phase_timer import STEP_PHASES
from cifar_towers.towers import Tower
from cifar_towers.training import build
from cifar_towers.training.devices import setup_towers
from cifar_towers.training.precision import choose

PEAK_FLOPS = "ceilings.json"  # in a seed's directory: the peak rates before and after it
SAME_MACHINE = ("processor", "cores", "gpus", "precision", "onednn")  # of environment.json, equal for all seeds
UNCHECKED = {"recipe", "train_dir", "data_dir", "overwrite"}  # settings in which the seeds of a race may differ
ONE_TOWER = {
    "num_gpus": 1,
    "strategy": "towers",
    "parallelism": "data",
    "micro_batches": 1,
    "all_reduce": "auto",
    "variable_placement": "cpu",
    "gradient_device": "variable",
    "gpu_memory_growth": True,
}


class StepKind(NamedTuple):
    """What the operations of a step depend on."""

    image_size: int
    active_groups: tuple[str, ...]  # parameter groups that it updates


class Work(NamedTuple):
    """A run's steps of one kind, and the operations of one such step by type."""

    steps: int
    operations: dict[str, int]


def run_race(config: SpeedrunConfig, source: sources.Source) -> None:
    """Trains the seeds that are not yet trained, then compares frameworks; prints and writes the results of both."""
    make_directory(config.directory)
    gpus = gpu_names()  # before `setup_towers` hides all GPUs but one
    num_towers = config.recipe.num_gpus or (config.recipe.default_num_towers(len(gpus))[0] if gpus else 0)
    num_devices = min(num_towers, len(gpus)) or 1
    compute_dtype, _ = choose(config.recipe.precision, "GPU" if gpus else "CPU")
    towers = setup_towers(dataclasses.replace(config.recipe, **ONE_TOWER))  # all cores for one operation
    source, dataset = build.load_data(config.recipe, source)
    if source.banner:
        print(source.banner)
    recipe = dataclasses.replace(config.recipe, num_gpus=num_towers, dataset=dataset.name)
    config = dataclasses.replace(config, recipe=recipe)
    more = {"gpus": gpus, "precision": compute_dtype, "tta": recipe.tta, "target": config.target}
    facts = environment_facts(recipe, dataset.name) | more
    if config.seeds:
        work = count_work(recipe, towers, compute_dtype, dataset.train)
        seeds = _train_seeds(config, {**facts, "gpus": gpus[:num_towers]}, num_devices)
        race_results.publish_race(config.directory, facts, race_results.summarize_race(seeds, work, config.target))
    if config.rounds:
        precisions = list(dict.fromkeys(split_names(config.precisions) or [compute_dtype, "float32"]))
        bare = {"hard_example_pool": 0}  # the bare step, without selecting examples
        config = dataclasses.replace(config, recipe=dataclasses.replace(recipe, **bare))
        comparison = compare_frameworks(config, precisions, dataset, num_devices)
        race_results.publish_comparison(config.directory, facts | bare, *comparison)


def count_work(recipe: TrainConfig, towers: Sequence[Tower], compute_dtype: str, train: Split) -> dict[StepKind, Work]:
    """Operations of a recipe's run, counted in the graph of one tower's step, for each kind of step.

    Raises:
      UsageError: the operations cannot be counted in the graph.
    """
    batches = build.make_batches(recipe, train)
    length = recipe.run_length(batches.steps_per_epoch)
    image_size_at = schedules.ImageSizeSchedule(recipe.image_size_schedule, recipe.image_size).at(length)
    one_tower = dataclasses.replace(recipe, **ONE_TOWER)
    training = build.make_training(one_tower, towers[:1], compute_dtype, train, length)
    rates_at = training.state.optimizer.learning_rates
    steps = Counter(StepKind(image_size_at(step), tuple(rates_at(step))) for step in range(length.last))
    batch = batches.stream(0, 1).element_spec
    work = {}
    for kind, count in steps.items():
        rates = dict.fromkeys(kind.active_groups, tf.TensorSpec([], tf.float32))
        function = training.train_step.get_concrete_function(batch, rates, kind.image_size)
        try:
            work[kind] = Work(count, operations.count(function))
        except ValueError as error:
            raise UsageError(
                f"model={recipe.model} cannot be raced, as its operations cannot be counted ({error_text(error)}); "
                "--seeds= runs only the comparison of frameworks"
            ) from error
    return work


def _train_seeds(config: SpeedrunConfig, facts: Mapping, num_devices: int) -> list[dict]:
    """Trains one run per seed, and measures peak rates before, between and after; `facts` as in environment.json."""
    results = []
    before = peak_flops.measure(facts["precision"], gpus=num_devices)
    for seed in parse_seeds(config.seeds):
        train_dir = config.directory / f"seed{seed}"
        recipe = dataclasses.replace(config.recipe, seed=seed, train_dir=str(train_dir), eval_every_epochs=0.0)
        _check_same_conditions(train_dir, recipe, facts)
        earlier = {} if recipe.overwrite else files.read_json_if_any(train_dir / files.RESULT)
        result = processes.run_training(recipe)
        reused = result == earlier
        if reused:
            measured = files.read_json_if_any(train_dir / PEAK_FLOPS).get("measured", [])
        else:
            after = peak_flops.measure(facts["precision"], gpus=num_devices)
            measured, before = [before, after], after
            with files.best_effort_writes(train_dir / PEAK_FLOPS):
                files.write_json(train_dir / PEAK_FLOPS, {"measured": measured})
        environment = files.read_json_if_any(train_dir / files.ENVIRONMENT)
        results.append(
            {
                "seed": seed,
                "reused": reused,  # trained by an earlier command
                "revision": environment.get("git_revision", "unknown"),
                "seconds": result["seconds"],
                "step_seconds": sum(result["seconds"].get(phase, 0.0) for phase in STEP_PHASES),
                "images_per_sec": result["images_per_sec"],
                "accuracy": race_results.accuracy_on_test(result["evaluations"], recipe.tta),
                "plain_accuracy": race_results.accuracy_on_test(result["evaluations"], 0),
                "ceilings": measured,
            }
        )
    return results


def _check_same_conditions(train_dir: Path, recipe: TrainConfig, facts: Mapping) -> None:
    """Refuses an existing run with other settings or of another machine: all seeds of a race need the same, though a
    training could be resumed with another number of towers."""
    if recipe.overwrite:
        return
    left_open = set() if recipe.variable_placement else {"variable_placement"}
    settings = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in UNCHECKED | left_open}
    machine = {name: facts[name] for name in SAME_MACHINE}
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
