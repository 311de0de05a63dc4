"""Comparison of two runs: whether they are equal to the bit, where they first differ, and which settings differ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_checkpoint
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import names_with
from cifar_towers.errors import UsageError
from cifar_towers.evaluation.score import score_name
from cifar_towers.reporting.run_records import flatten, read_records

# Settings that differ between any two runs and do not change what is trained.
INCIDENTAL = {"command", "recipe", "seeds", *names_with(TrainConfig, per_run=True, per_worker=True)}
MAX_LISTED = 8  # entries of a list that is shown in full
COMPARED = {  # values of records, by kind
    "train": ("loss", "accuracy", "gradient_norm", "learning_rate"),
    "eval": ("loss", "accuracy"),
}

Finding = tuple[bool | None, str]  # whether the runs are equal in one respect, None if it cannot be compared; a line


def compare_runs(one: Path, other: Path) -> tuple[bool, str]:
    """Compare settings, environment and data; records and checkpoints of common steps; and the last weights.

    Returns:
      Whether the records and weights that both runs have are equal, False without any; and the lines to print.

    Raises:
      UsageError: one of them is not a run's directory. DataError: a file or checkpoint that both have is damaged.
    """
    for run in (one, other):
        if not (run / files.CONFIG).exists():
            raise UsageError(f"{run} has no {files.CONFIG}; give two runs' directories, e.g. runs/speed94-seed0")
    lines = []
    for kind, name in (("settings", files.CONFIG), ("environments", files.ENVIRONMENT)):
        ours, theirs = (flatten(files.read_json_if_any(run / name), INCIDENTAL) for run in (one, other))
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            changes = [f"{key} {_as_text(ours.get(key))} -> {_as_text(theirs.get(key))}" for key in differing]
            lines.append(f"{kind} differ: {', '.join(changes)}")
    lines = lines or ["settings and environments: same"]
    compared = [_compare_records(kind, one, other) for kind in COMPARED]
    compared += [_compare_checkpoints(one, other), _compare_last_weights(one, other)]
    findings = [found for found in compared if found]
    results = [equal for equal, _ in findings if equal is not None]
    if not results:
        lines.append("the runs have no step in common, so nothing can be compared")
    lines += [line for _, line in findings]
    return bool(results) and all(results), "\n".join(lines)


def _as_text(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) and len(value) > MAX_LISTED else str(value)


def _compare_records(kind: str, one: Path, other: Path) -> Finding | None:
    """Find the last common step with equal records of a kind, and the first step that differs."""
    noun = {"train": "losses", "eval": "evaluations"}[kind]
    records = [read_records(run / files.METRICS) for run in (one, other)]
    ours, theirs = ({record_key(r): r for r in of_run if r["kind"] == kind} for of_run in records)
    common = sorted(ours.keys() & theirs.keys())
    for step, score in common:
        pairs = {name: (ours[step, score].get(name), theirs[step, score].get(name)) for name in COMPARED[kind]}
        differing = [f"{name} {a} and {b}" for name, (a, b) in pairs.items() if repr(a) != repr(b)]  # NaN equals NaN
        if differing:
            before = [earlier for earlier, _ in common if earlier < step]
            since = f" (same until step {before[-1]})" if before else ""
            where = f"step {step}, {score}" if score else f"step {step}"
            return False, f"{noun}: from {where}: {', '.join(differing)}{since}"
    steps = sorted({step for step, _ in common})
    return (True, f"{noun}: same at all {len(steps)} common steps, the last {steps[-1]}") if steps else None


def record_key(record: Mapping[str, Any]) -> tuple[int, str]:
    """Return a record's step, and for an evaluation the name of its score, as a step may have several."""
    return record["step"], score_name(record) if record["kind"] == "eval" else ""


def _compare_checkpoints(one: Path, other: Path) -> Finding | None:
    """Find the first common step with different values, and the variables that differ most."""
    paths = [{path.name: path for path in list_checkpoints(run)} for run in (one, other)]
    common = sorted(paths[0].keys() & paths[1].keys())
    for name in common:
        ours, theirs = (read_checkpoint(of_run[name])[0] for of_run in paths)
        if unmatched := sorted(ours.keys() ^ theirs.keys()):
            return False, f"weights: from {name}: other variables, among them {', '.join(unmatched[:3])}"
        distances = {key: _relative_difference(ours[key], theirs[key]) for key in ours}
        differing = sorted((key for key in distances if distances[key] > 0), key=lambda key: -distances[key])
        if differing:
            largest = ", ".join(f"{key} ({distances[key]:.1e})" for key in differing[:3])
            summary = f"from {name}: {len(differing)} of {len(distances)} variables"
            return False, f"weights: {summary}; largest relative differences: {largest}"
    return (True, f"weights: same at {', '.join(common)}") if common else None


def _relative_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference over the largest value; infinity for other shapes, types or non-finite values."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    difference = np.max(np.abs(one - other)) / max(np.max(np.abs(one)), 1e-300)
    return max(float(difference), 5e-324) if np.isfinite(difference) else float("inf")  # -0.0 differs from 0.0


def _compare_last_weights(one: Path, other: Path) -> Finding | None:
    """Compare the weights of runs that ended at the same step."""
    results = [files.read_json_if_any(run / files.RESULT) for run in (one, other)]
    steps = [result.get("step") for result in results]
    if steps[0] != steps[1]:
        runs = zip((one, other), steps, strict=True)
        ends = [f"{run} ended at step {step}" if step else f"{run} has not ended" for run, step in runs]
        return None, f"{', '.join(ends)}: only the common part is compared"
    if not all(results):
        return None
    ours, theirs = (result["weights_sha256"] for result in results)
    summary = f"same, sha256 {ours[:16]}" if ours == theirs else f"sha256 {ours[:16]} and {theirs[:16]}"
    return ours == theirs, f"weights after step {steps[0]}: {summary}"
