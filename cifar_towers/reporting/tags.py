"""Tags of the scalars that a run writes, and the charts of TensorBoard's CUSTOM SCALARS made of them.

No tag holds a tower's name: what is written for each tower has one tag and a directory for every tower, which
TensorBoard overlays in one chart.
"""

import re
from collections.abc import Iterable

# Training, all towers together.
LOSS, ACCURACY = "loss", "accuracy"  # evaluations add `/<split>/<weights>`
GRADIENT_NORM, LOSS_SCALE = "health/gradient_norm", "health/loss_scale"
BAD_STEPS, ROLLBACKS = "health/bad_steps", "health/rollbacks"
IMAGES_PER_SEC, STEP_SECONDS, INPUT_WAIT = "speed/images_per_sec", "speed/step_seconds", "speed/input_wait"
NOISE_SCALE = "towers/gradient_noise_scale"
LEARNING_RATE, PROXY = "learning_rate", "proxy"  # add the parameter group; `/loss` and `/accuracy`
MEMORY, GPU_UTILIZATION = "memory", "gpu_utilisation"  # add the device
# Each layer, weight, tower and class: add its name (a tower's is its directory).
ACTIVATIONS, SPARSITY = "activations", "sparsity"
WEIGHTS, GRADIENTS = "weights", "gradients"
WEIGHT_NORM, WEIGHT_GRADIENT_NORM, UPDATE_RATIO = "weight_norm", "gradient_norm", "update_ratio"
TOWER_LOSS, TOWER_GRADIENT_NORM, TOWER_COSINE = "towers/loss", "towers/gradient_norm", "towers/cosine"
CLASS_ACCURACY, PRECISION_RECALL = "class_accuracy", "precision_recall"
# Pictures, and the end of the run.
INPUT_IMAGES, MISTAKES, CONFUSION = "input/augmented", "mistakes", "confusion"
FINAL = "final"


def raw_loss(term: str) -> str:
    """Tag of a loss term of the final tower in one step."""
    return f"losses/{term} (raw)"


def smoothed_loss(term: str) -> str:
    """Tag of a loss term's moving average."""
    return f"losses/{term}"


def custom_scalars(loss_terms: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """The charts: {category: {title: [regular expressions of tags]}}."""
    return {
        "learning": {
            "training loss, raw and smoothed": [_exactly(LOSS), *(_exactly(smoothed_loss(t)) for t in loss_terms)],
            "evaluation accuracy": [_below(ACCURACY)],
            "training accuracy (batch)": [_exactly(ACCURACY)],
            "evaluation loss": [_below(LOSS)],
        },
        "health": {
            "gradient norm": [_exactly(GRADIENT_NORM)],
            "update-to-weight ratio": [_below(UPDATE_RATIO) + "kernel"],
            "activation sparsity": [_below(SPARSITY)],
            "bad steps and rollbacks": [_exactly(BAD_STEPS), _exactly(ROLLBACKS)],
            "learning rates": [_below(LEARNING_RATE)],
        },
        "tower agreement": {
            "loss of each tower": [_exactly(TOWER_LOSS)],
            "gradient norm of each tower": [_exactly(TOWER_GRADIENT_NORM)],
            "cosine similarity to the mean gradient": [_exactly(TOWER_COSINE)],
            "gradient noise scale, examples": [_exactly(NOISE_SCALE)],
        },
        "speed": {
            "throughput, images/s": [_exactly(IMAGES_PER_SEC)],
            "input wait, share of the time": [_exactly(INPUT_WAIT)],
            "memory, MB": [_below(MEMORY)],
            "GPU utilization, %": [_below(GPU_UTILIZATION)],
        },
        "errors by class": {"accuracy of each class": [_below(CLASS_ACCURACY)]},
    }


def _exactly(tag: str) -> str:
    return re.escape(tag) + "$"


def _below(prefix: str) -> str:
    return re.escape(prefix) + "/.*"
