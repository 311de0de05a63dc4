"""Comparison of two runs: whether they are equal to the bit, where they first differ, and which settings differ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.checkpointing.variables import read_variables
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import names_with
from cifar_towers.errors import UsageError
from cifar_towers.reporting.run_records import read_records

# Settings that differ between any two runs and do not change what is trained.
INCIDENTAL = {"command", "recipe", "seeds", *names_with(TrainConfig, per_run=True, per_worker=True)}
MAX_LISTED = 8  # entries of a list shown in full
COMPARED = ("loss", "accuracy", "gradient_norm", "learning_rate")


class Finding(NamedTuple):
    """One result of a comparison; `equal` is None where nothing could be compared."""

    equal: bool | None
    text: str


def compare_runs(one: Path, other: Path) -> Finding:
    """Compare settings, environment and data; records and checkpoints of common steps; and the last weights.

    The finding is equal if all that both runs have is equal, and they have something in common.

    Raises:
      UsageError: one of them is not a run's directory. DataError: a checkpoint that both have is damaged.
    """
    for run in (one, other):
        if not (run / files.CONFIG).exists():
            raise UsageError(f"{run} has no {files.CONFIG}; give two runs' directories, as runs/speed94-seed0")
    causes = [
        f"{kind} differ: {differences}"
        for kind, name in (("settings", files.CONFIG), ("environments", files.ENVIRONMENT))
        if (differences := _differences(*(files.read_json_if_any(run / name) for run in (one, other))))
    ]
    findings = [f for f in (_records(one, other), _checkpoints(one, other), _last_weights(one, other)) if f]
    results = [finding.equal for finding in findings if finding.equal is not None]
    lines = causes or ["settings and environments: same"]
    if not results:
        lines.append("the runs have no step in common, so nothing can be compared")
    lines += [finding.text for finding in findings]
    return Finding(bool(results) and all(results), "\n".join(lines))


def _records(one: Path, other: Path) -> Finding | None:
    """The last common step with equal training records, and the first that differs."""
    records = [
        {record["step"]: record for record in read_records(run / files.METRICS) if record["kind"] == "train"}
        for run in (one, other)
    ]
    common = sorted(records[0].keys() & records[1].keys())
    for index, step in enumerate(common):
        pairs = {name: tuple(of_run[step].get(name) for of_run in records) for name in COMPARED}
        differing = [f"{name} {values[0]} and {values[1]}" for name, values in pairs.items() if values[0] != values[1]]
        if differing:
            since = f" (same until step {common[index - 1]})" if index else ""
            return Finding(False, f"losses: from step {step}: {', '.join(differing)}{since}")
    if not common:
        return None
    return Finding(True, f"losses: same at all {len(common)} common steps, the last {common[-1]}")


def _checkpoints(one: Path, other: Path) -> Finding | None:
    """The first common step with different values, and the variables that differ most."""
    paths = [{path.name: path for path in list_checkpoints(run)} for run in (one, other)]
    common = sorted(paths[0].keys() & paths[1].keys())
    for name in common:
        values = [read_variables(of_run[name]) for of_run in paths]
        if unmatched := sorted(values[0].keys() ^ values[1].keys()):
            return Finding(False, f"weights: from {name}: other variables, among them {', '.join(unmatched[:3])}")
        distances = {key: _relative_difference(values[0][key], values[1][key]) for key in values[0]}
        differing = sorted((key for key in distances if distances[key] > 0), key=distances.get, reverse=True)
        if differing:
            largest = ", ".join(f"{key} ({distances[key]:.1e})" for key in differing[:3])
            summary = f"from {name}: {len(differing)} of {len(distances)} variables"
            return Finding(False, f"weights: {summary}; largest relative differences: {largest}")
    return Finding(True, f"weights: same at {', '.join(common)}") if common else None


def _relative_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference over the largest value; infinite for different shapes or for values that are not finite."""
    if one.shape != other.shape:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    difference = np.max(np.abs(one - other)) / max(np.max(np.abs(one)), 1e-300)
    return max(float(difference), 5e-324) if np.isfinite(difference) else float("inf")  # -0.0 differs from 0.0


def _last_weights(one: Path, other: Path) -> Finding | None:
    """Whether both runs ended at one step with equal weights."""
    results = [files.read_json_if_any(run / files.RESULT) for run in (one, other)]
    steps, digests = ([result.get(key) for result in results] for key in ("step", "weights_sha256"))
    if steps[0] != steps[1]:
        runs = zip((one, other), steps, strict=True)
        ends = [f"{run} ended at step {step}" if step else f"{run} has not ended" for run, step in runs]
        return Finding(None, f"{', '.join(ends)}: only the common part is compared")
    if not all(digests):
        return None
    equal = digests[0] == digests[1]
    summary = f"same, sha256 {digests[0][:16]}" if equal else f"sha256 {digests[0][:16]} and {digests[1][:16]}"
    return Finding(equal, f"weights after step {steps[0]}: {summary}")


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> str:
    """`name a -> b` for every setting that differs, with the path of nested ones."""
    parts = []
    for name in sorted((one.keys() | other.keys()) - INCIDENTAL):
        values = one.get(name), other.get(name)
        if all(isinstance(value, Mapping) for value in values):
            parts.append(_differences(*values, f"{prefix}{name}."))
        elif values[0] != values[1]:
            parts.append(f"{prefix}{name} {_describe_difference(*values)}")
    return ", ".join(part for part in parts if part)


def _describe_difference(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) > MAX_LISTED:
        return f"({sum(a != b for a, b in zip(one, other, strict=True))} of {len(one)} entries)"
    return f"{_describe(one)} -> {_describe(other)}"


def _describe(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) and len(value) > MAX_LISTED else str(value)
