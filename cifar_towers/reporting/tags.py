"""Tags of a run in TensorBoard, and the charts of CUSTOM SCALARS that are made of them.

No tag holds a tower's name. The scalars of every tower have the same tags in a directory per tower, so that TensorBoard
overlays them in one chart.
"""

import re
from collections.abc import Collection

# Training, all towers together.
LOSS, ACCURACY, ECE = "loss", "accuracy", "ece"  # only evaluations have ECE; see `EVALUATED`
LOSS_TERMS, RAW = "losses", " (raw)"  # add the term: `losses/<term>` is smoothed, `losses/<term> (raw)` is not
GRADIENT_NORM, LOSS_SCALE = "health/gradient_norm", "health/loss_scale"
SKIPPED_STEPS, ROLLBACKS = "health/skipped_steps", "health/rollbacks"
IMAGES_PER_SEC, STEP_SECONDS, INPUT_WAIT = "speed/images_per_sec", "speed/step_seconds", "speed/input_wait"
NOISE_SCALE = "towers/gradient_noise_scale"
LEARNING_RATE, PROXY = "learning_rate", "proxy"  # add the parameter group; `/loss` and `/accuracy`
MEMORY, GPU_UTILIZATION = "memory", "gpu_utilisation"  # add the device
# Each layer, weight, tower and class: add its name (a tower's name is its directory).
ACTIVATIONS, SPARSITY = "activations", "sparsity"
WEIGHTS, GRADIENTS = "weights", "gradients"
WEIGHT_NORM, WEIGHT_GRADIENT_NORM, UPDATE_RATIO = "weight_norm", "gradient_norm", "update_ratio"
TOWER_LOSS, TOWER_GRADIENT_NORM, TOWER_COSINE = "towers/loss", "towers/gradient_norm", "towers/cosine"
CLASS_ACCURACY, PRECISION_RECALL = "class_accuracy", "precision_recall"
# Pictures, and the end of the run.
INPUT_IMAGES, MISTAKES, CONFUSION = "input/augmented", "mistakes", "confusion"
FINAL = "final"
# Prefixes of statistics over seeds. The mean has the tag of the single runs.
SEED_MEAN, SEED_STD, SEED_COUNT = "", "std/", "n/"
SEED_LOW, SEED_HIGH = "mean-std/", "mean+std/"
# Key of a training record in metrics.jsonl -> tag of the same value.
RECORDED = {
    "loss": LOSS, "accuracy": ACCURACY, "gradient_norm": GRADIENT_NORM, "images_per_sec": IMAGES_PER_SEC,
    "input_wait": INPUT_WAIT, "skipped_steps": SKIPPED_STEPS, "gradient_noise_scale": NOISE_SCALE,
}  # fmt: skip
EVALUATED = (ACCURACY, LOSS, ECE)  # keys of an evaluation's record, and beginnings of their tags; see `score_name`


def _only(tag: str) -> str:
    return re.escape(tag) + "$"


def _below(prefix: str) -> str:
    return re.escape(prefix) + "/.*"


# category -> title -> regular expressions of the tags that the chart shows, each a curve for every run and tower
CHARTS = {
    "overview": {
        "training loss, raw and smoothed": [_only(LOSS), re.escape(LOSS_TERMS) + f"/(?!.*{re.escape(RAW)}$)"],
        "evaluation accuracy": [_below(ACCURACY)],
        "learning rates": [_below(LEARNING_RATE)],
        "gradient norm": [_only(GRADIENT_NORM)],
        "throughput, images/s": [_only(IMAGES_PER_SEC)],
    },
    "learning": {
        "training accuracy (batch)": [_only(ACCURACY)],
        "evaluation loss": [_below(LOSS)],
        "expected calibration error": [_below(ECE)],
    },
    "health": {
        "update-to-weight ratio": [_below(UPDATE_RATIO) + "kernel"],
        "activation sparsity": [_below(SPARSITY)],
        "skipped steps and rollbacks": [_only(SKIPPED_STEPS), _only(ROLLBACKS)],
    },
    "tower agreement": {
        "loss of each tower": [_only(TOWER_LOSS)],
        "gradient norm of each tower": [_only(TOWER_GRADIENT_NORM)],
        "cosine similarity to the mean gradient": [_only(TOWER_COSINE)],
        "gradient noise scale, examples": [_only(NOISE_SCALE)],
    },
    "speed": {
        "input wait, share of the time": [_only(INPUT_WAIT)],
        "memory, MB": [_below(MEMORY)],
        "GPU utilization, %": [_below(GPU_UTILIZATION)],
    },
    "errors by class": {"accuracy of each class": [_below(CLASS_ACCURACY)]},
}


def seed_charts(found: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """Return the charts of statistics over seeds that have one of the tags `found`: category -> title -> tags.

    No category has a name of `CHARTS`, because TensorBoard shows only one of two categories with the same name.
    """
    evaluated = {kind: [tag for tag in sorted(found) if tag.startswith(f"{kind}/")] for kind in EVALUATED}
    training = {"training loss": LOSS, "training accuracy (batch)": ACCURACY, "throughput, images/s": IMAGES_PER_SEC}
    categories = {
        "training, mean ± std over seeds": {title: [tag] for title, tag in training.items() if tag in found},
        "evaluation, mean ± std over seeds": {f"evaluation {kind}": tags for kind, tags in evaluated.items() if tags},
    }
    return {name: charts for name, charts in categories.items() if charts}
