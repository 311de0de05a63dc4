"""Two runs side by side: whether they are the same to the bit, where they part, and what was not the same for both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_variables
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import names_with
from cifar_towers.errors import UsageError
from cifar_towers.files import run_files
from cifar_towers.reporting import jsonl

# What differs between any two runs, and tells nothing of why they part.
INCIDENTAL = {"command", "recipe", "seeds", *names_with(TrainConfig, per_run=True, per_worker=True)}
LISTED = 8  # entries of a list that is told whole
COMPARED = ("loss", "accuracy", "gradient_norm", "learning_rate")


def compare(one: Path, other: Path) -> tuple[bool, str]:
    """(whether all that both have is the same, the findings in words, a line each).

    Compares settings, machine and data; the records of the steps that both have; the values in the checkpoints of
    steps that both have, and the last weights.

    Raises:
      UsageError: one of them is not a run's directory. DataError: a checkpoint that both have is damaged.
    """
    for run in (one, other):
        if not (run / run_files.CONFIG).exists():
            raise UsageError(f"{run} holds no {run_files.CONFIG}; give two runs' directories, as runs/speed94-seed0")
    causes = [
        f"{kind} differ: {told}"
        for kind, name in (("settings", run_files.CONFIG), ("circumstances", run_files.ENVIRONMENT))
        if (told := _differences(run_files.read_json_if_any(one / name), run_files.read_json_if_any(other / name)))
    ]
    same, findings = [], []
    for compared in (_records(one, other), _checkpoints(one, other), _ends(one, other)):
        if compared:
            same += [compared[0]] if compared[0] is not None else []
            findings.append(compared[1])
    if not same:
        findings.insert(0, "they have no step in common: nothing can be said")
    return all(same) and bool(same), "\n".join([*(causes or ["settings and circumstances are the same"]), *findings])


def _records(one: Path, other: Path) -> tuple[bool, str] | None:
    """Of the training records: the last common step that is the same, and the first that is not."""
    found = [_training_records(run) for run in (one, other)]
    common = sorted(found[0].keys() & found[1].keys())
    if not common:
        return None
    for index, step in enumerate(common):
        odd = [name for name in COMPARED if found[0][step].get(name) != found[1][step].get(name)]
        if odd:
            values = ", ".join(f"{name} {found[0][step].get(name)} and {found[1][step].get(name)}" for name in odd)
            since = f"the same until step {common[index - 1]}, " if index else ""
            return False, f"records: {since}different at step {step}: {values}"
    return True, f"records: the same at all {len(common)} common steps, the last {common[-1]}"


def _training_records(run: Path) -> dict[int, dict]:
    return {r["step"]: r for r in jsonl.read_records(run / run_files.METRICS) if r["kind"] == "train"}


def _checkpoints(one: Path, other: Path) -> tuple[bool, str] | None:
    """Of the checkpoints: the first common step with other values, and which are furthest apart."""
    names = [{path.name: path for path in list_checkpoints(run)} for run in (one, other)]
    common = sorted(names[0].keys() & names[1].keys())
    for name in common:
        values = [read_variables(of_one[name]) for of_one in names]
        if values[0].keys() != values[1].keys():
            odd = sorted(values[0].keys() ^ values[1].keys())
            return False, f"checkpoints: {name} has other variables, among them {', '.join(odd[:3])}"
        apart = {key: _distance(values[0][key], values[1][key]) for key in values[0]}
        odd = sorted((key for key in apart if apart[key] > 0), key=apart.get, reverse=True)
        if odd:
            furthest = ", ".join(f"{key} ({apart[key]:.1e})" for key in odd[:3])
            return False, (
                f"checkpoints: {name} differs in {len(odd)} of {len(apart)} variables; largest relative differences: "
                f"{furthest}"
            )
    return (True, f"checkpoints: the same to the bit at {', '.join(common)}") if common else None


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference, in parts of the largest value; infinite where the shapes or only one's numbers do not fit."""
    if one.shape != other.shape:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    apart = np.max(np.abs(one - other)) / max(np.max(np.abs(one)), 1e-300)
    return max(float(apart), 5e-324) if np.isfinite(apart) else float("inf")  # a zero's sign is a difference too


def _ends(one: Path, other: Path) -> tuple[bool | None, str] | None:
    """Of the results: whether they ended at one step with the same weights; None if that cannot be said."""
    results = [run_files.read_json_if_any(run / run_files.RESULT) for run in (one, other)]
    steps, digests = ([result.get(key) for result in results] for key in ("step", "weights_sha256"))
    if steps[0] != steps[1]:
        told = [
            f"{run} ended at step {step}" if step else f"{run} has not ended"
            for run, step in zip((one, other), steps, strict=True)
        ]
        return None, f"{', '.join(told)}: only what both have is compared"
    if not all(digests):
        return None
    same = digests[0] == digests[1]
    told = f"the same to the bit, sha256 {digests[0][:16]}" if same else "different"
    return same, f"weights after step {steps[0]}: {told}"


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> str:
    """`name a -> b` of every setting that differs, nested ones by their path."""
    told = []
    for name in sorted((one.keys() | other.keys()) - INCIDENTAL):
        here, there = one.get(name), other.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            told.append(_differences(here, there, f"{prefix}{name}."))
        elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there) > LISTED:
            odd = sum(one != other for one, other in zip(here, there, strict=True))
            told += [f"{odd} of {len(here)} {prefix}{name}"] if odd else []
        elif here != there:
            told.append(f"{prefix}{name} {_shortly(here)} -> {_shortly(there)}")
    return ", ".join(part for part in told if part)


def _shortly(value: Any) -> str:
    """A value in words; of a long list, as of layers, how many it has."""
    return f"a list of {len(value)}" if isinstance(value, list) and len(value) > LISTED else str(value)
