"""Comparison of two runs: whether they are equal to the bit, where they first differ, and which
settings differ.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_checkpoint
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import names_with
from cifar_towers.errors import printable
from cifar_towers.evaluation.score import score_name
from cifar_towers.inference.run import Run, load_run
from cifar_towers.inference.runs import flatten

# Settings that differ between any two runs and do not change what is trained.
INCIDENTAL = {"command", "recipe", "seeds", *names_with(TrainConfig, per_run=True, per_worker=True)}
MAX_LISTED = 8  # entries of a list that is shown in full
COMPARED = {  # values of records, by kind
    "train": ("loss", "accuracy", "gradient_norm", "learning_rate"),
    "eval": ("loss", "accuracy"),
}

Finding = tuple[
    bool | None, str
]  # whether the runs are equal in one respect, None if it cannot be compared; a line


def compare_runs(one: Path, other: Path) -> tuple[bool, str]:
    """Compare settings, environment and data; records and checkpoints of common steps; and the last
    weights.

    Returns:
      Whether the records and weights that both runs have are equal, False without any; and the
      lines to print.

    Raises:
      UsageError: one of them is not a run's directory. DataError: a file or checkpoint that both
        have is damaged.
    """
    runs = load_run(one), load_run(other)
    settings = _describe_changes("settings", *(run.config for run in runs))
    settings += _describe_changes("environments", *(run.environment for run in runs))
    compared = [
        _compare_records("losses", COMPARED["train"], *(run.history for run in runs)),
        _compare_records("evaluations", COMPARED["eval"], *(run.evaluations for run in runs)),
        _compare_checkpoints(*runs),
        _compare_last_weights(*runs),
    ]
    findings = [found for found in compared if found]
    results = [equal for equal, _ in findings if equal is not None]
    if not results:
        findings.append((None, "the runs have no step in common, so nothing can be compared"))
    lines = [*(settings or ["settings and environments: same"]), *(line for _, line in findings)]
    return bool(results) and all(results), "\n".join(map(printable, lines))


def _describe_changes(noun: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a line with the values that differ, or none."""
    first, second = (flatten(values, INCIDENTAL) for values in (one, other))
    differing = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    changes = [
        f"{key} {_as_text(first.get(key))} -> {_as_text(second.get(key))}" for key in differing
    ]
    return [f"{noun} differ: {', '.join(changes)}"] if changes else []


def _as_text(value: Any) -> str:
    return (
        f"a list of {len(value)}"
        if isinstance(value, list) and len(value) > MAX_LISTED
        else str(value)
    )


def _compare_records(
    noun: str, names: tuple[str, ...], *records: list[dict[str, Any]]
) -> Finding | None:
    """Find the last common step with equal records, and the first step that differs."""
    first, second = ({record_key(record): record for record in of_run} for of_run in records)
    common = sorted(first.keys() & second.keys())
    for step, score in common:
        pairs = {
            name: (first[step, score].get(name), second[step, score].get(name)) for name in names
        }
        differing = [
            f"{name} {a} and {b}" for name, (a, b) in pairs.items() if repr(a) != repr(b)
        ]  # NaN equals NaN
        if differing:
            before = [earlier for earlier, _ in common if earlier < step]
            since = f" (same until step {before[-1]})" if before else ""
            where = f"step {step}, {score}" if score else f"step {step}"
            return False, f"{noun}: from {where}: {', '.join(differing)}{since}"
    steps = sorted({step for step, _ in common})
    return (
        (True, f"{noun}: same at all {len(steps)} common steps, the last {steps[-1]}")
        if steps
        else None
    )


def record_key(record: Mapping[str, Any]) -> tuple[int, str]:
    """Return a record's step, and for an evaluation the name of its score, as a step may have
    several.
    """
    return record["step"], score_name(record) if record["kind"] == "eval" else ""


def _compare_checkpoints(*runs: Run) -> Finding | None:
    """Find the first common step with different values, and the variables that differ most."""
    paths = [{path.name: path for path in list_checkpoints(run.directory)} for run in runs]
    common = [name for name in paths[0] if name in paths[1]]
    for name in common:
        first, second = (read_checkpoint(of_run[name])[0] for of_run in paths)
        shapes, other_shapes = (
            {(k, v.shape, v.dtype) for k, v in values.items()} for values in (first, second)
        )
        if unmatched := sorted({key for key, *_ in shapes ^ other_shapes}):
            return (
                False,
                f"weights: from {name}: other variables, among them {', '.join(unmatched[:3])}",
            )
        distances = {  # the largest difference over the largest value
            key: np.abs(value.astype(np.float64) - second[key]).max()
            / max(float(np.abs(value).max()), 1e-300)
            for key, value in first.items()
            if value.tobytes() != second[key].tobytes()  # -0.0 differs from 0.0
        }
        if distances:
            differing = sorted(distances, key=lambda key: -distances[key])
            largest = ", ".join(f"{key} ({distances[key]:.1e})" for key in differing[:3])
            summary = f"from {name}: {len(differing)} of {len(first)} variables"
            return False, f"weights: {summary}; largest relative differences: {largest}"
    return (True, f"weights: same at {', '.join(common)}") if common else None


def _compare_last_weights(*runs: Run) -> Finding:
    """Compare the weights of runs that ended at the same step."""
    if not all(run.finished for run in runs) or runs[0].step != runs[1].step:
        states = ", ".join(f"{run.directory} is {run.state} at step {run.step}" for run in runs)
        return None, f"{states}: only the common part is compared"
    first, second = (run.result["weights_sha256"] for run in runs if run.result)
    summary = (
        f"same, sha256 {first[:16]}"
        if first == second
        else f"sha256 {first[:16]} and {second[:16]}"
    )
    return first == second, f"weights after step {runs[0].step}: {summary}"
