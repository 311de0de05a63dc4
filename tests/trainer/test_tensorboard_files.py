"""The TensorBoard files of a run."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.short_runs import TINY, events_of, run, tensors_of

TAGS = {"loss", "accuracy", "input/augmented", "memory/host_mb"}
TAGS |= {"health/gradient_norm", "health/skipped_steps"}
TAGS |= {"losses/cross_entropy", "losses/cross_entropy (raw)"}
TAGS |= {"losses/total_loss", "losses/total_loss (raw)"}
TAGS |= {"learning_rate/kernels", "learning_rate/biases", "learning_rate/head"}
TAGS |= {"speed/images_per_sec", "speed/step_seconds", "speed/input_wait"}
TAGS |= {"activations/group1_gelu1", "sparsity/group1_gelu1"}
TAGS |= {"weights/group1_conv1/kernel", "gradients/group1_conv1/kernel"}


@pytest.mark.slow
def test_tags_of_a_speednet(speednet_run):
    train = events_of(speednet_run[0] / "train")
    assert set(train.Tags()["tensors"]) >= TAGS
    counts = tensors_of(train, "activations/group1_gelu1")
    assert counts[20][:, 2].sum() == 64 * 9 * 9 * 64  # 64 images after the first pool, 64 channels


def test_each_tower_has_a_curve_of_its_own_and_a_box_in_the_graph(tiny_run):
    train = events_of(tiny_run.directory / "train")
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
    shown = tensors_of(evaluated, "accuracy/test_tta")

    assert shown[20] == pytest.approx(result["evaluations"][-1]["accuracy"])
    assert tensors_of(evaluated, "final/training_seconds")[20] > 0


def test_smoothed_losses_are_moving_averages_of_the_raw_ones(tiny_run):
    train = events_of(tiny_run.directory / "train")
    for term in ("cross_entropy", "total_loss"):
        raw = tensors_of(train, f"losses/{term} (raw)")
        averaged = tensors_of(train, f"losses/{term}")
        total = np.float64(0)
        weight = np.float64(0)
        for step in range(1, 21):
            total = 0.9 * total + 0.1 * np.float64(raw[step])
            weight = 0.9 * weight + 0.1
            assert averaged[step] == pytest.approx(total / weight, rel=1e-6)


def test_towers_have_tags_of_their_own_if_there_are_several(tmp_path, tiny_run):
    run(TINY, tmp_path, max_steps=2)
    one = set(events_of(tmp_path / "train").Tags()["tensors"])
    two = set(events_of(tiny_run.directory / "train").Tags()["tensors"])

    assert one == {tag for tag in two if not tag.startswith("tower_")}
    assert {path.parent.name for path in tiny_run.directory.glob("*/events.*")} == {"train", "eval"}
