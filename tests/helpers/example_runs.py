"""Directories of runs as training leaves them, with made-up numbers, for tests of the report and of
tables of runs.
"""

import json

import numpy as np

from cifar_towers.data.dataset import CLASSES
from cifar_towers.reporting import figures

STEPS = 8  # one an epoch; every second is evaluated
PICTURE = figures.image_grid(np.zeros((1, 32, 32, 3), np.uint8), ["cat"], "a picture")


def make_run(
    directory,
    recipe="speed94",
    seed=0,
    *,
    towers=2,
    finished=True,
    last_step=STEPS,
    ema=False,
    **settings,
):
    """Write the directory of a run; its numbers follow from the recipe, the seed and the step."""
    directory.mkdir(parents=True)
    final = 0.9
    if recipe == "speed94":
        final += 0.02
    final += 0.004 * (3 * seed % 5)

    records = []
    evaluations = []
    for step in range(1, last_step + 1):
        records.append(_train_record(step, final))
        is_last = finished and step == last_step
        if step % 2 == 0 or is_last:
            weights = "ema" if ema else "raw"
            with_tta = [False, True] if is_last else [False]
            evaluations = [_evaluation(step, weights, tta, final) for tta in with_tta]
            common = {"kind": "eval", "step": step, "epoch": step, "training_seconds": 60 * step}
            records += [common | evaluation for evaluation in evaluations]

    config = {
        "recipe": recipe,
        "model": "net",
        "seed": seed,
        "batch_size": 1536,
        "train_dir": str(directory),
    }
    (directory / "config.json").write_text(json.dumps(config | settings))
    environment = {
        "command": ["cifar-towers", "train", f"--seed={seed}", "--data_dir=/a b"],
        "packages": {"numpy": "2.4.6"},
        "git_revision": f"abc123{seed}",
        "towers": towers * [{"device": "/CPU:0"}],
        "precision": "bfloat16",
        "processor": "Abacus",
        "cores": 2,
        "data_sha256": {"train": "c50e2d9aebe4fd88", "test": "4b43d2e153a74d46"},
        "class_names": CLASSES,
    }
    (directory / "environment.json").write_text(json.dumps(environment))
    write_records(directory, records)
    for name in ("confusion.png", "mistakes.png"):
        (directory / name).write_bytes(PICTURE)
    if finished:
        result = {
            "step": last_step,
            "dataset": "cifar10",
            "images_per_sec": 1875.4 + seed,
            "skipped_steps": 0,
            "seconds": {
                "start": 4.2,
                "compile": 21.5,
                "train": 540.25 + seed,
                "input": 2.5,
                "evaluate": 11.0,
            },
            "weights_sha256": 64 * f"{seed:x}",
            "evaluations": evaluations,
        }
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def make_runs(directory, count=3, recipe="speed94", **settings):
    """Make runs of a recipe that differ in their seed."""
    return [
        make_run(directory / f"{recipe}-seed{seed}", recipe, seed, **settings)
        for seed in range(count)
    ]


def _train_record(step, final):
    return {
        "kind": "train",
        "step": step,
        "epoch": step,
        "loss": 0.7 + 1 / step,
        "accuracy": final - 0.5 / step,
        "learning_rate": 1 - step / STEPS,
        "gradient_norm": 1.0,
        "skipped_steps": 0,
        "images_per_sec": 1500.0 + step if step > 1 else None,  # no step has been timed yet
    }


def _evaluation(step, weights, tta, final):
    accuracy = final - 0.4 / step
    if tta:
        accuracy += 0.006
    if weights == "ema":
        accuracy += 0.01
    return {
        "split": "test",
        "weights": weights,
        "tta": tta,
        "count": 1000,
        "accuracy": accuracy,
        "loss": 1 - accuracy,
    }


def read_records(directory, kind=None):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def write_records(directory, records):
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))


def read_result(directory):
    return json.loads((directory / "result.json").read_text())


def change(directory, name, **values):
    """Change values of a JSON file."""
    content = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(content | values))


def write_scores(directory, *scores):
    """Leave these scores alone in a run's result and records."""
    kind = {"split": "test", "weights": "raw", "tta": False, "count": 100, "loss": 1.0}
    change(directory, "result.json", evaluations=[kind | score for score in scores])
    write_records(directory, read_records(directory, "train"))
