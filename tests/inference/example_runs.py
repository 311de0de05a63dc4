"""Directories of runs as training leaves them, with made-up numbers, for tests of the report."""

import json
import math

import numpy as np

from cifar_towers.reporting import figures

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
STEPS, STEPS_PER_RECORD, STEPS_PER_EPOCH = 264, 11, 33
LAYERS = [("whiten", "Conv2D", 24, 672), ("conv_1", "Conv2D", 64, 13824), ("head", "Dense", 10, 640)]
PICTURE = figures.png(np.random.default_rng(0).integers(0, 256, (300, 800, 3), np.uint8))


def make_run(directory, recipe="speed94", seed=0, *, towers=2, finished=True, last_step=STEPS, ema=False, **settings):
    """Write the directory of a run of 8 epochs; its final accuracy is a function of recipe and seed."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng([seed, len(recipe)])
    final_accuracy = 0.938 if recipe == "speed94" else 0.921
    records, evaluations = [], []
    for step in range(STEPS_PER_RECORD, last_step + 1, STEPS_PER_RECORD):
        records.append(_train_record(step, final_accuracy, towers, rng))
        is_last = finished and step == last_step
        if step % (2 * STEPS_PER_EPOCH) == 0 or is_last:
            kinds = [(weights, tta) for weights in ("raw", "ema")[: 1 + ema] for tta in (0, 2)[: 1 + is_last]]
            evaluations = [_evaluation(step, weights, tta, final_accuracy, rng) for weights, tta in kinds]
            epoch = step / STEPS_PER_EPOCH
            records += [{"kind": "eval", "step": step, "epoch": epoch, **evaluation} for evaluation in evaluations]
    (directory / "config.json").write_text(json.dumps(_config(directory, recipe, seed) | settings))
    (directory / "environment.json").write_text(json.dumps(_environment(recipe, seed, towers)))
    write_records(directory, records)
    for name in ("confusion.png", "mistakes.png"):
        (directory / name).write_bytes(PICTURE)
    if finished:
        (directory / "result.json").write_text(json.dumps(_result(last_step, seed) | {"evaluations": evaluations}))
    return directory


def _config(directory, recipe, seed):
    return {
        "recipe": recipe, "model": "speednet94", "seed": seed, "batch_size": 1536, "epochs": 8.0, "seeds": "",
        "train_dir": str(directory), "precision": "auto", "num_gpus": 0, "optimizer": "muon", "tta": 2,
    }  # fmt: skip


def _environment(recipe, seed, towers):
    command = ["cifar-towers", "train", f"--recipe={recipe}", f"--seed={seed}", "--data_dir=/a b"]
    return {
        "command": command, "python": "3.11.2", "platform": "Linux-6.1", "processor": "AMD EPYC", "cores": 2,
        "packages": {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"}, "git_revision": f"abc123{seed}",
        "towers": [{"name": f"tower_{k}", "device": f"/CPU:{k}"} for k in range(towers)], "precision": "bfloat16",
        "data_sha256": {"train": "c50e2d9aebe4fd88", "test": "4b43d2e153a74d46"}, "synthetic_data": "",
        "class_names": CLASSES,
    }  # fmt: skip


def _train_record(step, final_accuracy, towers, rng):
    done = step / STEPS
    loss = 0.75 + 1.4 * math.exp(-4 * done) + 0.03 * rng.normal()
    norm = 0.4 + 0.6 * done + 0.05 * rng.normal()
    record = {
        "kind": "train", "step": step, "epoch": step / STEPS_PER_EPOCH, "image_size": 24 if done <= 0.5 else 32,
        "skipped_steps": 0, "loss": loss, "gradient_norm": norm, "learning_rate": 0.2 * (1 - done),
        "accuracy": min(0.99, final_accuracy * (1 - 0.8 * math.exp(-5 * done)) + 0.01 * rng.normal()),
        "images_per_sec": (3100 if done <= 0.5 else 1500) + 40 * rng.normal(), "input_wait": abs(0.01 * rng.normal()),
    }  # fmt: skip
    if step == STEPS_PER_RECORD:
        record["images_per_sec"] = None  # no step has been timed yet
    if step % (2 * STEPS_PER_RECORD) == 0:
        record["towers"] = {
            "loss": [loss + 0.01 * k for k in range(towers)],
            "gradient_norm": [1.1 * norm + 0.01 * k for k in range(towers)],
            "cosine": [0.9 - 0.2 * done - 0.01 * k for k in range(towers)],
        }
    return record


def _evaluation(step, weights, tta, final_accuracy, rng):
    accuracy = final_accuracy * (1 - 0.9 * math.exp(-6 * step / STEPS)) + 0.006 * bool(tta) + 0.001 * rng.normal()
    errors = rng.dirichlet(np.full(10, 0.4), 10) * (1 - accuracy)
    confusion = np.round(1000 * (errors + accuracy * np.eye(10))).astype(int)
    measured = {"accuracy": np.trace(confusion) / confusion.sum(), "loss": 1.3 - accuracy}
    kind = {"split": "test", "weights": weights, "tta": tta, "count": int(confusion.sum())}
    return kind | measured | {"confusion": confusion.tolist()}


def _result(step, seed):
    seconds = {"start": 4.2, "compile": 21.5, "train": 540.25 + seed, "input": 2.5, "evaluate": 11.0, "save": 1.25}
    return {
        "step": step, "reached": 0.0, "dataset": "cifar10", "seconds": seconds, "images_per_sec": 1875.4 + seed,
        "weights_sha256": f"{seed:x}" * 64, "failed_saves": 0, "skipped_steps": 0, "rollbacks": 0,
    }  # fmt: skip


def read_records(directory, kind=None):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def write_records(directory, records):
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read_result(directory):
    return json.loads((directory / "result.json").read_text())


def accuracies(directories, tta):
    """Return the final accuracies in percent."""
    return [100 * s["accuracy"] for d in directories for s in read_result(d)["evaluations"] if s["tta"] == tta]


def change(directory, name, **values):
    """Change values of a JSON file."""
    (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | values))
