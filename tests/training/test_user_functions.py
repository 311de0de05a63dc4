"""An augmentation and a loss of the user's own: what they get, what the step makes of it, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from cifar_towers.training.build import load_augmentation, load_loss
from cifar_towers.user_code import log_once
from tests.runs.short_runs import TINY, run, small_runs, stopped_after
from tests.training.runs import Run

PAGE = Path(__file__).parents[2] / "docs/your-own.md"
CODE = r"```\n((?:import tensorflow as tf\n\n)?def (?:mixup|brier).*?)```"
DOCUMENTED = "".join(re.findall(CODE, PAGE.read_text(), re.S))
FUNCTIONS = """

def darken(images, draws):
    return 0 * images

def centered(images, draws):
    return images - tf.reduce_mean(images, 0)

def smaller(images, draws):
    return images[:, 1:]

def no_labels(images, labels, draws):
    return images

def wanton(images, draws):
    return images + tf.random.uniform(images.shape)

def broken(images, draws):
    return images + nothing

def balanced(labels, logits):
    weights = 1 / (1 + tf.reduce_sum(labels, 0))
    return tf.reduce_sum(labels * weights, 1) * brier(labels, logits)

def total(labels, logits):
    return tf.reduce_mean(logits)

share, twice = tf.Variable(0.5), tf.constant(2.0)

def counting(images, draws):
    share.assign_add(1.0)
    return images

def scheduled(labels, logits):
    return share * brier(labels, logits)

def doubled(labels, logits):
    return twice * brier(labels, logits)
"""
CIFARNET = {"model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 24, "precision": "float32"}
RATE = 0.05


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(DOCUMENTED + FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def train(file, towers, examples):
    """train(count, steps, function names by setting, more settings): a run on `count` towers, and its metrics."""

    def make(count, steps, functions, **settings):
        named = {setting: f"{file}:{name}" for setting, name in functions.items()}
        run = Run(towers(count), examples, TrainConfig(**CIFARNET | named | settings))
        return run, [run.step(step, rates=run.rates(rate=RATE)) for step in range(steps)]

    return make


def test_mixup_on_two_towers_and_in_micro_batches_is_that_of_one(train):
    (one, first), (two, second), (parts, _) = (
        train(count, 3, {"augment": "mixup"}, micro_batches=parts) for count, parts in ((1, 1), (2, 1), (2, 3))
    )
    for other in (two, parts):
        for name, value in one.values("model.").items():
            np.testing.assert_allclose(other.values("model.")[name], value, rtol=0, atol=1e-4, err_msg=name)
    np.testing.assert_allclose([m.loss for m in first], [m.loss for m in second], rtol=1e-4)
    plain, metrics = train(1, 3, {})
    assert metrics[2].loss != first[2].loss
    assert any(np.abs(plain.values("model.")[n] - v).max() > 1e-3 for n, v in one.values("model.").items())


def test_the_step_trains_on_what_the_augmentation_returns(train, file, examples):
    """Mixed labels, by hand: the mean of -sum(labels * log softmax(logits)), plus the net's weight decay."""
    run, _ = train(1, 0, {"augment": "mixup"})
    batch, logits_of = run.batches.at(0), run.state.model
    images = build.make_augmentation(run.config, examples.info).augment(batch.images, batch.draws)
    mixed, labels = load_augmentation(f"{file}:mixup", 24, 10)(images, batch.labels, batch.draws.own)
    share = np.maximum(batch.draws.own[:, 0], 1 - batch.draws.own[:, 0])
    pairs = np.arange(24).reshape(-1, 2)[:, ::-1].ravel()
    one_hot = np.eye(10)[batch.labels]
    np.testing.assert_allclose(labels, share[:, None] * one_hot + (1 - share[:, None]) * one_hot[pairs], atol=1e-6)
    expected = -(labels * tf.nn.log_softmax(logits_of(mixed))).numpy().sum(1).mean()
    correct = (logits_of(mixed).numpy().argmax(1) == labels.numpy().argmax(1)).mean()
    metrics = run.step(0)
    assert metrics.loss == pytest.approx(expected, rel=1e-5) and metrics.accuracy == pytest.approx(correct)


def test_own_loss_replaces_the_cross_entropy(train):
    run, _ = train(2, 0, {"augment": "darken", "loss": "brier"})
    batch = run.batches.at(0)
    probabilities = tf.nn.softmax(run.state.model(tf.zeros([24, 24, 24, 3]))).numpy()
    expected = ((probabilities - np.eye(10)[batch.labels]) ** 2).sum(1).mean()
    assert run.step(0).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("smaller", ("(4, 19, 20, 3) float32", "not (4, 20, 20, 3) float32")),
        ("no_labels", ("returns (4, 20, 20, 3) float32,", "(4, 10) float32")),
        ("wanton", ("other values in a second call", "use draws")),
        ("broken", ("it fails: mine.py, line ", ": NameError: name 'nothing' is not defined")),
        ("counting", ("uses a tf.Variable", "checkpoints do not hold", "use its arguments and tf.constant alone")),
        ("nowhere", ("has no function nowhere", "mixup")),
    ],
)
def test_an_augmentation_that_cannot_be_used_is_refused_in_one_line(file, name, parts):
    with pytest.raises(UsageError) as caught:
        load_augmentation(f"{file}:{name}", 20, 10)
    message = str(caught.value)
    assert message.startswith(f"augment={file}:{name}: ") and "\n" not in message
    assert all(part in message for part in parts), message


def test_hard_examples_are_not_chosen_by_losses_of_mixed_ones(train):
    train(1, 0, {"augment": "darken"}, batch_size=16, hard_example_pool=24)
    with pytest.raises(UsageError, match="mixup: it takes labels.* give --hard_example_pool=0"):
        train(1, 0, {"augment": "mixup"}, batch_size=16, hard_example_pool=24)


def test_a_loss_of_another_shape_is_refused(file):
    with pytest.raises(UsageError, match=r"loss=.*:total: it returns \(\) float32, and not \(4,\) float32"):
        load_loss(f"{file}:total", 10)


def test_a_loss_that_draws_is_refused_without_advice_that_it_cannot_follow(tmp_path):
    file = tmp_path / "mine.py"
    draw = "tf.random.uniform([tf.shape(logits)[0]])"
    file.write_text(f"import tensorflow as tf\n\n\ndef noisy(labels, logits):\n    return {draw}\n")
    with pytest.raises(UsageError, match=r"noisy: it returns other values in a second call .*; take all from its arg"):
        load_loss(f"{file}:noisy", 10)


@pytest.mark.parametrize("strategy", ["towers", "mirrored"])
def test_a_loss_with_a_variable_is_refused_and_one_with_a_constant_is_not(train, strategy):
    with pytest.raises(UsageError, match=r"^loss=\S*mine.py:scheduled: it uses a tf.Variable"):
        train(2, 0, {"loss": "scheduled"}, strategy=strategy)
    (_, doubled), (_, plain) = (train(2, 1, {"loss": name}, strategy=strategy) for name in ("doubled", "brier"))
    assert doubled[0].loss == pytest.approx(2 * plain[0].loss)


@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_a_loss_that_mixes_the_examples_is_logged(file, caplog, num_classes):
    caplog.set_level("INFO", "cifar_towers")
    log_once.cache_clear()
    load_loss(f"{file}:brier", num_classes)
    assert not caplog.text
    for _ in range(2):
        load_loss(f"{file}:balanced", num_classes)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"loss={file}:balanced: it depends on how a batch is split, so towers would")


def test_an_augmentation_that_mixes_images_without_labels_is_logged(file, caplog):
    caplog.set_level("INFO", "cifar_towers")
    log_once.cache_clear()
    for name in ("mixup", "darken"):
        load_augmentation(f"{file}:{name}", 20, 10)
    assert not caplog.text
    load_augmentation(f"{file}:centered", 20, 10)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"augment={file}:centered: it depends on how a batch is split")


def test_a_resumed_run_draws_the_same_numbers(file, tmp_path):
    functions = {"augment": f"{file}:mixup", "loss": f"{file}:brier"}
    config = replace(TINY, **functions, batch_size=40, num_gpus=2, max_steps=8, checkpoint_every_steps=3)
    with small_runs(synthetic.make(400, 0, 0), synthetic.make(100, 0, 1)):
        whole = run(config, tmp_path / "whole")
        resumed = run(config, stopped_after(3, tmp_path / "whole", tmp_path / "stopped"))
        assert resumed["weights_sha256"] == whole["weights_sha256"]
        with pytest.raises(UsageError, match="augment"):
            run(replace(config, augment=""), tmp_path / "whole")
