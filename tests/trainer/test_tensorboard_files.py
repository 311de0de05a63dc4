"""The TensorBoard files of a run."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import synthetic
from tests.helpers.configs import recipe
from tests.helpers.short_runs import TINY, events_of, run, small_runs, tensors_of

TAGS = {"loss", "accuracy", "health/gradient_norm", "health/skipped_steps"}
TAGS |= {
    "losses/cross_entropy",
    "losses/cross_entropy (raw)",
    "losses/total_loss",
    "losses/total_loss (raw)",
}
TAGS |= {f"learning_rate/{group}" for group in ("kernels", "biases", "head", "whitening")}
TAGS |= {
    "speed/images_per_sec",
    "speed/step_seconds",
    "speed/input_wait",
    "memory/host_mb",
    "input/augmented",
}
TAGS |= {f"{kind}/group1_gelu1" for kind in ("activations", "sparsity")}
TAGS |= {f"{kind}/group1_conv1/kernel" for kind in ("weights", "gradients")}


@pytest.mark.slow
def test_tags_of_a_speednet(speednet_run):
    train = events_of(speednet_run[0] / "train")
    assert set(train.Tags()["tensors"]) >= TAGS
    counts = tensors_of(train, "activations/group1_gelu1")
    assert counts[20][:, 2].sum() == 64 * 9 * 9 * 32  # 64 images after the first pool, 32 channels


def test_each_tower_has_a_curve_of_its_own_and_a_box_in_the_graph(tiny_run):
    train = events_of(tiny_run[0] / "train")
    assert {"tower_0", "tower_1"} <= {node.name.split("/")[0] for node in train.Graph().node}
    for tower in ("tower_0", "tower_1"):
        cosines = tensors_of(train, f"{tower}/cosine")
        assert list(cosines) == [5, 10, 15, 20]
        assert 0 < cosines[5] <= 1


def test_pictures_and_scores(tiny_run):
    directory, result, _ = tiny_run
    train = events_of(directory / "train")
    evaluated = events_of(directory / "eval")
    for events, tag in (
        (train, "input/augmented"),
        (evaluated, "confusion/test"),
        (evaluated, "mistakes/test"),
    ):
        width, height, png = tensors_of(events, tag)[20]
        assert tf.io.decode_png(png).shape == (int(height), int(width), 3)
    shown = tensors_of(evaluated, "accuracy/test/ema_tta")

    assert shown[20] == pytest.approx(result["evaluations"][-1]["accuracy"])
    assert tensors_of(evaluated, "final/training_seconds")[20] > 0


def test_smoothed_losses_are_moving_averages_of_the_raw_ones(tiny_run):
    train = events_of(tiny_run[0] / "train")
    for term in ("cross_entropy", "total_loss"):
        raw, averaged = (tensors_of(train, f"losses/{term}{which}") for which in (" (raw)", ""))
        total = np.float64(0)
        weight = np.float64(0)
        for step in range(1, 21):
            total = 0.9 * total + 0.1 * np.float64(raw[step])
            weight = 0.9 * weight + 0.1
            assert averaged[step] == pytest.approx(total / weight, rel=1e-6)


PROXY = {"batch_size": 50, "hard_example_pool": 200}


@pytest.mark.parametrize(
    ("settings", "more"),
    [({}, set()), pytest.param(PROXY, {"proxy/loss", "proxy/accuracy"}, marks=pytest.mark.slow)],
)
def test_towers_have_tags_of_their_own_if_there_are_several(tmp_path, tiny_run, settings, more):
    run(TINY, tmp_path, max_steps=2, **settings)
    one, two = (
        set(events_of(path / "train").Tags()["tensors"]) for path in (tmp_path, tiny_run[0])
    )
    assert one == {tag for tag in two if not tag.startswith("tower_")} | more
    assert {path.parent.name for path in tiny_run[0].glob("*/events.*")} == {"train", "eval"}


def test_every_tag_of_the_tutorial_has_a_counterpart(tmp_path):
    """Read the table in docs/tensorboard.md row by row, with each of the names that the page lists
    for <layer>.
    """
    page = (Path(__file__).parents[2] / "docs" / "tensorboard.md").read_text()
    text, *table = page.split("## Tags of the TensorFlow tutorial")[1].split("\n| ")
    names = {
        kind: re.findall("`(.+?)`", listed)
        for kind, listed in re.findall(r"`(<\w+>)` is ([^.]*)", text)
    }
    cells = [
        [re.findall("`(.+?)`", cell) for cell in row.split(" | ")]
        for row in table
        if row.startswith("`")
    ]

    def tags_of(side):
        tags = {tag for row in cells for tag in row[side]}
        for kind, listed in names.items():
            tags = {tag.replace(kind, name) for tag in tags for name in listed}
        return tags

    tutorials = tags_of(0)
    ours = tags_of(1)
    layers = ("conv1", "conv2", "local3", "local4", "softmax_linear")
    of_layers = {
        f"{layer}/{kind}"
        for layer in layers
        for kind in ("activations", "sparsity", "weights", "biases")
    }
    of_layers |= {f"{layer}/{kind}/gradients" for layer in layers for kind in ("weights", "biases")}
    losses = {"cross_entropy", "local3/weight_loss", "local4/weight_loss", "total_loss"}
    losses |= {f"{loss} (raw)" for loss in losses}

    assert tutorials == of_layers | losses | {"images", "learning_rate", "Precision @ 1"}

    config = recipe(
        "cifarnet", dataset="synthetic", batch_size=64, max_steps=2, num_gpus=1, precision="float32"
    )
    with small_runs(synthetic.make(200, 0, 0), synthetic.make(50, 0, 1)):  # of 32 pixels
        run(config, tmp_path)
    tags = {
        tag for part in ("train", "eval") for tag in events_of(tmp_path / part).Tags()["tensors"]
    }

    assert ours <= tags, ours - tags
