"""The charts of a run and their titles: TensorBoard's CUSTOM SCALARS, and the curves of the HTML report."""

import re
from collections.abc import Collection
from typing import NamedTuple

from cifar_towers.reporting import tags


def _tag(tag: str) -> str:
    return re.escape(tag) + "$"


def _below(prefix: str) -> str:
    return re.escape(prefix) + "/.*"


SMOOTHED_LOSSES = re.escape(tags.smoothed_loss("")) + f"(?!.*{re.escape(tags.RAW)}$)"

# category -> title -> regular expressions of the tags that the chart shows, each a curve for every run and tower
CUSTOM_SCALARS = {
    "overview": {
        "training loss, raw and smoothed": [_tag(tags.LOSS), SMOOTHED_LOSSES],
        "evaluation accuracy": [_below(tags.ACCURACY)],
        "learning rates": [_below(tags.LEARNING_RATE)],
        "gradient norm": [_tag(tags.GRADIENT_NORM)],
        "throughput, images/s": [_tag(tags.IMAGES_PER_SEC)],
    },
    "learning": {
        "training accuracy (batch)": [_tag(tags.ACCURACY)],
        "evaluation loss": [_below(tags.LOSS)],
    },
    "health": {
        "update-to-weight ratio": [_below(tags.UPDATE_RATIO) + "kernel"],
        "activation sparsity": [_below(tags.SPARSITY)],
        "bad steps and rollbacks": [_tag(tags.BAD_STEPS), _tag(tags.ROLLBACKS)],
    },
    "tower agreement": {
        "loss of each tower": [_tag(tags.TOWER_LOSS)],
        "gradient norm of each tower": [_tag(tags.TOWER_GRADIENT_NORM)],
        "cosine similarity to the mean gradient": [_tag(tags.TOWER_COSINE)],
        "gradient noise scale, examples": [_tag(tags.NOISE_SCALE)],
    },
    "speed": {
        "input wait, share of the time": [_tag(tags.INPUT_WAIT)],
        "memory, MB": [_below(tags.MEMORY)],
        "GPU utilization, %": [_below(tags.GPU_UTILIZATION)],
    },
    "errors by class": {"accuracy of each class": [_below(tags.CLASS_ACCURACY)]},
}


def seed_charts(found: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """The charts of statistics over seeds, of those tags that were found: category -> title -> tags."""
    categories = {  # with names of their own: of two layouts, TensorBoard shows one category of a name
        "training, mean ± std over seeds": {
            "training loss": [tags.LOSS],
            "training accuracy (batch)": [tags.ACCURACY],
            "throughput, images/s": [tags.IMAGES_PER_SEC],
        },
        "evaluation, mean ± std over seeds": {
            "evaluation accuracy": [tag for tag in sorted(found) if tag.startswith(f"{tags.ACCURACY}/")],
            "evaluation loss": [tag for tag in sorted(found) if tag.startswith(f"{tags.LOSS}/")],
        },
    }
    charts = {name: {k: shown for k, shown in of.items() if {*shown} & {*found}} for name, of in categories.items()}
    return {name: of for name, of in charts.items() if of}


class Curve(NamedTuple):
    """What the report plots of a run's records: a key, the title, the y axis, and a factor for its unit."""

    key: str
    title: str
    y_label: str
    scale: float = 1


REPORT_CURVES = (  # of the training records in metrics.jsonl
    Curve("loss", "training loss (batch)", "loss"),
    Curve("accuracy", "training accuracy (batch)", "accuracy, %", 100),
    Curve("learning_rate", "learning rate", "learning rate"),
    Curve("gradient_norm", "gradient norm", "norm"),
    Curve("images_per_sec", "throughput", "images/s"),
    Curve("input_wait", "time waiting for input", "share of the time, %", 100),
    Curve("gradient_noise_scale", "gradient noise scale", "examples"),
)
