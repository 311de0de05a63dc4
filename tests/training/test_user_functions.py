"""An augmentation and a loss of the user's own: what they get, what the step makes of it, and what
is refused.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from cifar_towers.training.build import load_augmentation, load_loss
from tests.helpers.step_runs import StepRun

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-own.md").read_text()
BRIER = re.search(r"```\n(import tensorflow as tf\n\ndef brier.*?)```", PAGE, re.S)
DOCUMENTED = (ROOT / "examples/mixup.py").read_text() + BRIER[1]
FUNCTIONS = """

def darken(images, draws):
    return 0 * images

def smaller(images, draws):
    return images[:, 1:]

def no_labels(images, labels, draws):
    return images

def total(labels, logits):
    return tf.reduce_mean(logits)
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
    """train(count, steps, function names by setting, more settings): a run on `count` towers, and
    its metrics.
    """

    def make(count, steps, functions, precision="float32", **settings):
        named = {setting: f"{file}:{name}" for setting, name in functions.items()}
        config = TrainConfig(**CIFARNET | named | settings)
        run = StepRun(towers(count), examples, config, precision)
        return run, [run.step(step, rates=run.rates(rate=RATE)) for step in range(steps)]

    return make


def test_mixup_on_two_towers_in_micro_batches_is_that_of_one(train):
    one, first = train(1, 2, {"augment": "mixup"}, micro_batches=1)
    parts, second = train(2, 2, {"augment": "mixup"}, micro_batches=3)

    found = parts.values("model.")
    for name, value in one.values("model.").items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4, err_msg=name)
    np.testing.assert_allclose([m.loss for m in first], [m.loss for m in second], rtol=1e-4)


def test_the_step_trains_on_what_the_augmentation_returns(train, file, examples):
    """Mixed labels, by hand: the mean of -sum(labels * log softmax(logits)), plus the net's weight
    decay.
    """
    run, _ = train(1, 0, {"augment": "mixup"})
    batch = run.batches.at(0)
    logits_of = run.state.model
    images = build.make_augmentation(run.config, examples.info).augment(batch.images, batch.draws)
    mixup = load_augmentation(f"{file}:mixup", 24, 10)
    mixed, labels = mixup(images, batch.labels, batch.draws.user)

    share = np.maximum(batch.draws.user[:, 0], 1 - batch.draws.user[:, 0])
    pairs = np.arange(24).reshape(-1, 2)[:, ::-1].ravel()
    one_hot = np.eye(10)[batch.labels]
    expected_labels = share[:, None] * one_hot + (1 - share[:, None]) * one_hot[pairs]
    np.testing.assert_allclose(labels, expected_labels, atol=1e-6)

    expected = -(labels * tf.nn.log_softmax(logits_of(mixed))).numpy().sum(1).mean()
    correct = (logits_of(mixed).numpy().argmax(1) == labels.numpy().argmax(1)).mean()
    metrics = run.step(0)

    assert metrics.loss == pytest.approx(expected, rel=1e-5)
    assert metrics.accuracy == pytest.approx(correct)


def test_own_loss_replaces_the_cross_entropy(train):
    run, _ = train(2, 0, {"augment": "darken", "loss": "brier"}, precision="float64")
    batch = run.batches.at(0)
    powers = np.exp(run.state.model(np.zeros([24, 24, 24, 3])).numpy())
    probabilities = powers / powers.sum(1, keepdims=True)
    expected = ((probabilities - np.eye(10)[batch.labels]) ** 2).sum(1).mean()
    assert run.step(0).loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (
            load_augmentation,
            "smaller",
            "(4, 20, 20, 3) float32, (4,) int32, not (4, 19, 20, 3) float32, (4,) int32",
        ),
        (load_augmentation, "no_labels", "(4, 20, 20, 3) float32, (4, 10) float32"),
        (lambda name, *_: load_loss(name, 10), "total", "(4,) float32, not () float32"),
    ],
)
def test_functions_that_would_train_something_else_are_refused(file, load, name, message):
    with pytest.raises(UsageError, match=f"{file}:{name}.*{re.escape(message)}"):
        load(f"{file}:{name}", 20, 10)
