"""The race: a recipe over seeds, each as a user would train it, against what this machine could do at its best."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.benchmark import baselines, framework_comparison, operations, peak_flops, processes, race_results
from cifar_towers.benchmark.peak_flops import Ceilings
from cifar_towers.benchmark.race_results import SeedResult
from cifar_towers.benchmark.report_io import circumstances, make_directory
from cifar_towers.cli.tool_configs import SpeedrunConfig
from cifar_towers.config import TrainConfig, parse_seeds, schedules
from cifar_towers.config.settings import split_names
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError, error_text
from cifar_towers.files import run_files
from cifar_towers.reporting import jsonl
from cifar_towers.towers import Tower
from cifar_towers.towers.devices import gpu_names
from cifar_towers.training import build
from cifar_towers.training import devices as opening
from cifar_towers.training.precision import choose

CEILINGS = "ceilings.json"  # in a seed's directory: what was measured before and after it
MACHINE = ("processor", "cores", "gpus", "precision", "onednn")  # what of environment.json a race is not over
ONE_TOWER = {"num_gpus": 1, "strategy": "towers", "parallelism": "data", "micro_batches": 1, "all_reduce": "auto"}
ONE_TOWER |= {"variable_placement": "cpu", "gradient_device": "variable", "gpu_memory_growth": True, "seeds": ""}


class Kind(NamedTuple):
    """What the operations of a step depend on: the side of its images, and the groups of variables that it moves."""

    side: int
    moving: tuple[str, ...]


class Work(NamedTuple):
    """What a run has to do: its steps of each kind, and the operations of one of them, by their type."""

    steps: dict[Kind, int]
    operations: dict[Kind, dict[str, int]]

    def total(self, less: int = 0) -> int:
        """Operations of the run, without `less` steps of each kind."""
        return sum((self.steps[kind] - less) * sum(of_step.values()) for kind, of_step in self.operations.items())

    def by_type(self) -> dict[str, int]:
        """Operations of the run."""
        types: Counter[str] = Counter()
        for kind, of_step in self.operations.items():
            types.update({name: self.steps[kind] * count for name, count in of_step.items()})
        return dict(types)


def run(config: SpeedrunConfig, source: sources.Source) -> None:
    """Trains the seeds that are not yet trained, then runs the side-by-side; prints and writes both."""
    make_directory(config)
    gpus = gpu_names()  # before one tower is opened, which hides those that it does not use
    by_default = config.default_num_towers(len(gpus))[0] if gpus else 0
    config = dataclasses.replace(config, num_gpus=config.num_gpus or by_default)
    devices = min(config.num_gpus, len(gpus)) or 1
    compute_dtype, _ = choose(config.precision, "GPU" if gpus else "CPU")  # as the weakest of them can
    towers = opening.setup_towers(
        config.replace_recipe(**ONE_TOWER)
    )  # all cores for one operation, as the ceilings want it
    source, dataset = build.load_data(config, source)
    if source.banner:
        print(source.banner)
    config = dataclasses.replace(config, dataset=dataset.name)
    facts = circumstances(config, dataset.name) | {
        "gpus": gpus,
        "precision": compute_dtype,
        "tta": config.tta,
        "target": config.target,
    }
    if config.seeds:
        work = count_work(config, towers, compute_dtype, dataset.train)
        finishes = _finishes(config, facts | {"gpus": gpus[: config.num_gpus]}, devices)
        race = race_results.tally(finishes, work.total(), work.total(less=1), config.target)
        race |= {"operations": work.by_type(), "steps": sum(work.steps.values())}
        race_results.publish_race(config.directory, facts, race)
    if config.rounds:
        asked = split_names(config.precisions)
        precisions = list(dict.fromkeys(asked or [compute_dtype, "float32"]))
        steps = dataclasses.replace(config, hard_example_pool=0)  # a step is compared, not how its examples are found
        batches = build.make_batches(steps, dataset.train)
        augmentation = build.make_augmentation(config, dataset.info)
        trained = baselines.count_trained(build.make_model(steps, "float32", dataset.info))
        rows, left_out = framework_comparison.run(steps, devices, precisions, batches, augmentation, trained)
        race_results.publish_side_by_side(config.directory, facts | {"hard_example_pool": 0}, rows, left_out)


def count_work(config: TrainConfig, towers: Sequence[Tower], compute_dtype: str, train: Split) -> Work:
    """The operations of a recipe's run, counted in its step as one tower makes it, once for each kind of step.

    Raises:
      UsageError: the graph of the step does not tell them.
    """
    batches = build.make_batches(config, train)
    length = config.run_length(batches.steps_per_epoch)
    side_at = schedules.ImageSizeSchedule(config.image_size_schedule, config.image_size).at(length)
    alone = config.replace_recipe(**ONE_TOWER)
    training = build.make_training(alone, towers[:1], compute_dtype, train, length)
    steps = Counter(Kind(side_at(step), tuple(training.state.optimizer.rates(step))) for step in range(length.last))
    batch = batches.stream(0, 1).element_spec
    counted = {}
    for kind in steps:
        rates = dict.fromkeys(kind.moving, tf.TensorSpec([], tf.float32))
        function = training.train_step.get_concrete_function(batch, rates, kind.side)
        try:
            counted[kind] = operations.count(function)
        except ValueError as error:
            why = f"model={config.model} cannot be raced, as its operations cannot be counted ({error_text(error)})"
            raise UsageError(f"{why}; --seeds= runs the side-by-side alone") from error
    return Work(dict(steps), counted)


def _finishes(config: SpeedrunConfig, facts: Mapping, devices: int) -> list[SeedResult]:
    """One training a seed, and the ceilings of the machine, of so many of its devices, before, between and after them.

    Args:
      facts: where they train, as their environment.json has it.
    """
    finishes = []
    before = peak_flops.measure(facts["precision"], gpus=devices)
    for seed in parse_seeds(config.seeds):
        train_dir = config.directory / f"seed{seed}"
        changes = {"seed": seed, "seeds": "", "train_dir": str(train_dir), "eval_every_epochs": 0.0}
        wanted = config.replace_recipe(**changes)
        _check_settings(train_dir, wanted, facts)
        earlier = {} if config.overwrite else run_files.read_json_if_any(train_dir / run_files.RESULT)
        result = processes.train(wanted)
        reused = result == earlier
        if not reused:
            after = peak_flops.measure(facts["precision"], gpus=devices)
            measured, before = [before, after], after
            with jsonl.best_effort_writes(train_dir / CEILINGS):
                run_files.write_json(train_dir / CEILINGS, {"measured": measured})
        else:
            measured = run_files.read_json_if_any(train_dir / CEILINGS).get("measured", [])
        environment = run_files.read_json_if_any(train_dir / run_files.ENVIRONMENT)
        finishes.append(
            SeedResult(
                seed=seed,
                reused=reused,
                revision=environment.get("git_revision", "unknown"),
                seconds=result["seconds"],
                images_per_sec=result["images_per_sec"],
                accuracy=race_results.accuracy(result["evaluations"], config.tta),
                plain_accuracy=race_results.accuracy(result["evaluations"], 0),
                ceilings=[Ceilings(*numbers) for numbers in measured],
            )
        )
    return finishes


def _check_settings(train_dir: Path, wanted: TrainConfig, facts: Mapping) -> None:
    """Refuses a run of other settings or on another machine: a training may go on with other towers, a race may not."""
    if wanted.overwrite:
        return
    theirs = run_files.read_json_if_any(train_dir / run_files.CONFIG)
    passed_over = {"recipe", "train_dir", "data_dir", "overwrite"}
    differing = [
        f"{name} {theirs[name]} -> {value}"
        for name, value in dataclasses.asdict(wanted).items()
        if name in theirs and name not in passed_over and value not in (theirs[name], "auto")
    ]
    there = run_files.read_json_if_any(train_dir / run_files.ENVIRONMENT)
    differing += [
        f"{name} {there[name]} -> {facts[name]}" for name in MACHINE if name in there and there[name] != facts[name]
    ]
    if differing:
        raise UsageError(
            f"{train_dir} is of other settings or another machine ({', '.join(differing)}); "
            "give those settings, another --train_dir, or --overwrite to run all seeds again"
        )
