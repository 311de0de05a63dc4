"""What a race came to: means and deviations over its seeds, its share of the ceiling, and tables of both parts."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers.benchmark.framework_comparison import OURS, Competitor
from cifar_towers.benchmark.peak_flops import Ceilings
from cifar_towers.benchmark.report_io import align, publish_text, title
from cifar_towers.reporting.phase_timer import TRAINING


class Published(NamedTuple):
    """A record that was run elsewhere, on PyTorch."""

    steps: int
    batch_size: int
    accuracy: float  # mean, with TTA
    runs: int


PUBLISHED = {"speednet94": Published(243, 1536, 0.9401, 200)}  # the 2025 CIFAR-10 speed record


@dataclasses.dataclass
class SeedResult:
    """One seed's training."""

    seed: int
    reused: bool  # run by an earlier command
    revision: str  # of the code it ran
    seconds: dict[str, float]  # by activity
    images_per_sec: float
    accuracy: float  # on test, with the recipe's TTA
    plain_accuracy: float  # without
    ceilings: list[Ceilings]  # of the machine, before and after it

    @property
    def step_seconds(self) -> float:
        """Of all steps, with the wait for their batches and the telling of them; compilation is apart."""
        return sum(self.seconds.get(activity, 0.0) for activity in TRAINING)


def accuracy(evaluations: Sequence[Mapping], tta: int) -> float:
    """The last evaluation's on test, of the averaged weights where there are some."""
    found = {e["weights"]: e["accuracy"] for e in evaluations if (e["split"], e["tta"]) == ("test", tta)}
    return found.get("ema", found["raw"])


def spread(values: Sequence[float]) -> dict:
    """Mean, standard deviation of a sample (None of one) and how many."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": deviation, "n": len(values)}


def tally(finishes: Sequence[SeedResult], work: int, timed_work: int, target: float) -> dict:
    """A race in numbers. Its `whole_training` is mean seconds of all steps: those of the timed ones, with as much for
    the first of each kind as their operations take at that rate.

    Args:
      work: operations of a run.
      timed_work: without those of the steps that were booked as compilation.
      target: the mean accuracy that is to be reached; 0: none.
    """
    rates = [measured.convolution for finish in finishes for measured in finish.ceilings]
    training = [finish.step_seconds for finish in finishes]
    of_activity = {
        name: spread([finish.seconds.get(name, 0.0) for finish in finishes])
        for name in ("compile", "start", "evaluate", "save")
    }
    reached = spread([finish.accuracy for finish in finishes])
    ceiling = statistics.mean(rates) if rates else None
    whole = statistics.mean(training) * (work / timed_work if timed_work else 1.0)
    return {
        "seeds": [dataclasses.asdict(finish) | {"step_seconds": finish.step_seconds} for finish in finishes],
        "accuracy": reached,
        "plain_accuracy": spread([finish.plain_accuracy for finish in finishes]),
        "training": spread(training),
        "whole_training": whole,
        **of_activity,
        "images_per_sec": spread([finish.images_per_sec for finish in finishes]),
        "seconds_to_target": whole if reached["mean"] >= target > 0 else None,
        "work": work,
        "ceilings": [measured._asdict() for finish in finishes for measured in finish.ceilings],
        "ceiling": ceiling,
        "limit_seconds": work / ceiling / 1e9 if ceiling else None,
        "fraction_of_ceiling": timed_work / statistics.mean(training) / ceiling / 1e9 if ceiling else None,
    }


def publish_race(folder: Path, facts: Mapping, race: Mapping) -> None:
    """Prints what the seeds came to, and writes it to race.json and race.txt."""
    publish_text(folder, "race", {**facts, **race}, [_title(facts), race_text(facts, race)])


def publish_side_by_side(folder: Path, facts: Mapping, rows: Sequence[Competitor], left_out: Mapping[str, str]) -> None:
    """Prints who was how fast, and writes it to side_by_side.json and side_by_side.txt."""
    as_json = [dataclasses.asdict(row) | {"median": row.median, row.spread_of: row.spread} for row in rows]
    told = {**facts, "contestants": as_json, "left_out": dict(left_out)}
    publish_text(folder, "side_by_side", told, [_title(facts), rows_text(facts, rows, left_out)])


def _title(facts: Mapping) -> str:
    batches = f"batches of {facts['batch_size']:,}"
    batches += f", the hardest of {facts['hard_example_pool']:,}" if facts["hard_example_pool"] else ""
    return title(facts, facts["model"], batches, facts["dataset"], facts["precision"])


def race_text(facts: Mapping, race: Mapping) -> str:
    """A line a seed, their mean and deviation, and what they say of the target and of the machine."""
    heads = [
        "seed",
        f"TTA {facts['tta']}",
        "no TTA",
        "training",
        "compilation",
        "start-up",
        "evaluation",
        "saving",
        "images/s",
    ]
    times = ("compile", "start", "evaluate", "save")
    lines = [
        [
            str(seed["seed"]) + "*" * seed["reused"],
            *(f"{100 * seed[name]:.2f} %" for name in ("accuracy", "plain_accuracy")),
            f"{seed['step_seconds']:,.1f} s",
            *(f"{seed['seconds'].get(name, 0.0):,.1f} s" for name in times),
            f"{seed['images_per_sec']:,.0f}",
        ]
        for seed in race["seeds"]
    ]
    for which in ("mean", "std"):
        if race["accuracy"][which] is not None:
            percents = [f"{100 * race[name][which]:.2f} %" for name in ("accuracy", "plain_accuracy")]
            seconds = [f"{race[name][which]:,.1f} s" for name in ("training", *times)]
            lines.append([which, *percents, *seconds, f"{race['images_per_sec'][which]:,.0f}"])
    return "\n\n".join([align([heads, *lines], left=(0,)), _conclusion(facts, race)])


def _conclusion(facts: Mapping, race: Mapping) -> str:
    mean, deviation, n = race["accuracy"].values()
    told = f"mean {100 * mean:.2f} %, " + (f"std {100 * deviation:.2f}, " if deviation is not None else "") + f"n={n}"
    seconds, compiling = race["whole_training"], race["compile"]["mean"]
    verdict = f"Seconds to {100 * facts['target']:.2f} %"
    if not facts["target"]:
        verdict = f"Accuracy: {told}, after {seconds:,.1f} s of training"
    elif race["seconds_to_target"] is None:
        verdict += f": not reached: {told}, after {seconds:,.1f} s of training"
    else:
        verdict += f": {seconds:,.1f} s of training ({told})"
    lines = [
        f"{verdict}: of its timed steps, and as much for the first of each kind, which is in the {compiling:,.1f} s of "
        "compilation too.",
        _shares(race),
    ]
    if race["ceiling"]:
        rates = ", ".join(f"{measured['convolution']:,.0f}" for measured in race["ceilings"])
        products = ", ".join(f"{measured['matmul']:,.0f}" for measured in race["ceilings"])
        lines.append(
            f"This machine's ceiling: {race['ceiling']:,.0f} GFLOP/s (3x3 convolutions forward, before and after each "
            f"seed: {rates}; products of matrices: {products}). A run at it takes {race['limit_seconds']:,.1f} s; "
            f"training ran at {100 * race['fraction_of_ceiling']:.1f} % of it."
        )
    earlier = [f"{seed['seed']} (revision {seed['revision']})" for seed in race["seeds"] if seed["reused"]]
    if earlier:
        lines.append(f"* run by an earlier command: seed {', '.join(earlier)}; --overwrite runs all again.")
    return "\n".join(lines)


def _shares(race: Mapping) -> str:
    kinds = sorted(race["operations"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {100 * count / race['work']:.1f} %" for kind, count in kinds)
    return (
        f"Operations of a run, counted in its graph: {race['work'] / 1e9:,.0f} GFLOP in {race['steps']:,} steps "
        f"({shares}); what is done element by element is not counted."
    )


def rows_text(facts: Mapping, rows: Sequence[Competitor], left_out: Mapping[str, str]) -> str:
    """The side-by-side as a table, and how to read it."""
    ours = {(row.precision, row.devices): row.median for row in rows if row.name == OURS}
    lines = [["contestant", "precision", "devices", "images/s", rows[0].spread_of, "n", "ours/theirs"]]
    for row in sorted(rows, key=lambda row: (row.precision, -row.median)):
        low, high = row.spread
        ratio = "-" if row.name == OURS else f"{ours[row.precision, row.devices] / row.median:.2f}"
        rates = [f"{row.median:,.0f}", f"{low:,.0f}-{high:,.0f}"]
        lines.append([row.name, row.precision, str(row.devices), *rates, row.n, ratio])
    notes = [READING.format(OURS), *(f"Left out: {who}: {why}" for who, why in left_out.items())]
    return "\n\n".join([align(lines, left=(0,)), "\n".join([*notes, *_published(facts, rows)])])


def _published(facts: Mapping, rows: Sequence[Competitor]) -> list[str]:
    """What the fastest of PyTorch here would need for the record of this net."""
    theirs = [row for row in rows if row.name.startswith("pytorch")]
    record = PUBLISHED.get(facts["model"])
    if not record or not theirs:
        return []
    best = max(theirs, key=lambda row: row.median)
    seconds = record.steps * record.batch_size / best.median
    return [
        f"The published recipe on PyTorch, computed and not run: its {record.steps} steps of {record.batch_size:,} at "
        f"the {best.median:,.0f} images/s of {best.name}, {best.precision}, take {seconds:,.0f} s, without input, to "
        f"its published mean of {100 * record.accuracy:.2f} % (n={record.runs})."
    ]


READING = (
    "Medians over rounds, each of which visits all in another order; n is rounds x timed steps of a visit. {0} is a "
    "whole training by scripts/train.py on full images, with input and summaries, without its compiling step; peers "
    "take bare steps over the same batches (the tutorial with its own input). All take the step that most of a run "
    "has, after the bias of a whitening has come to rest. Devices are GPUs, or the one CPU; ours/theirs is between "
    "equal numbers of them. TF_ENABLE_ONEDNN_OPTS is the same for all of TensorFlow; every process has all cores."
)
