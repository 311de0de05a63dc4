from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import Split
from cifar_towers.evaluation import evaluator
from cifar_towers.evaluation.evaluator import Classifier, Logits
from cifar_towers.evaluation.score import Score
from cifar_towers.training.distributed_step import make_strategy


@pytest.fixture
def reader():
    """Make a net that reads the class from the red level of the first pixel."""
    images = keras.Input((32, 32, 3))
    red = keras.layers.Flatten()(images[:, :1, :1, :1])
    return keras.Model(images, keras.layers.Dense(10, use_bias=False, name="read")(red))


def make_evaluator(every_steps, validation=0, tta=False):
    """Return an evaluator until step 10, and a list of the calls of its classifier. Its logit of
    class 0 is the first weight, and ten times as large with TTA; the others are 0.
    """
    calls = []

    def logits(images, weights, non_trainable, tta):
        calls.append((len(images), weights, non_trainable, tta))
        plain = np.tile([weights[0], 0.0, 0.0], (len(images), 1))
        return Logits(plain, 10 * plain)

    weights = "ema", [2.0], ["averages"]
    counts = {"validation": validation, "test": 7}
    splits = {
        name: Split(np.zeros((n, 4, 4, 3), np.uint8), np.zeros(n, np.int64))
        for name, n in counts.items()
    }
    classifier = SimpleNamespace(logits=logits)
    return evaluator.Evaluator(
        classifier, splits, weights, every_steps, last_step=10, tta=tta
    ), calls


@pytest.mark.parametrize(
    ("every_steps", "expected"),
    [(0, []), (1, [*range(1, 10)]), (3, [3, 6, 9]), (5, [5]), (10, []), (11, [])],
)
def test_evaluations_are_due_every_so_many_steps_before_the_last(every_steps, expected):
    evaluations, _ = make_evaluator(every_steps)
    assert [step for step in range(12) if evaluations.is_due(step)] == expected


@pytest.mark.parametrize(("validation", "first"), [(0, "test"), (5, "validation")])
def test_the_first_split_is_scored_before_the_end_and_all_of_them_at_the_end(validation, first):
    evaluations, calls = make_evaluator(3, validation, tta=True)
    found = evaluations.run()

    assert [(each.split, each.weights, each.tta) for each in found] == [(first, "ema", False)]
    assert calls == [(validation or 7, [2.0], ["averages"], False)]

    found = evaluations.run(final=True)
    expected = []
    for split in dict.fromkeys((first, "test")):
        expected += [(split, "ema", False, 0.787), (split, "ema", True, 1.0)]

    rows = [
        (each.split, each.weights, each.tta, round(float(each.score.probabilities[0, 0]), 3))
        for each in found
    ]

    assert rows == expected


@pytest.mark.parametrize(("count", "examples"), [(1, 10), (2, 4001), (3, 10), (7, 1)])
def test_every_example_counts_once_on_any_number_of_towers(towers, reader, count, examples):
    labels = np.random.default_rng(0).integers(0, 2, examples)
    red = labels == np.arange(examples) % 2  # right for a part of them
    images = np.zeros((examples, 32, 32, 3), np.uint8)
    images[:, 0, 0, 0] = 255 * red
    classifier = Classifier(reader, towers(count), Augmentation())
    logits = classifier.logits(images, [tf.one_hot([1], 10)], [])
    found = Score(labels, logits.plain)

    assert found.count == examples
    # below the mean level the logit of class 1 is negative, and class 0 is the first of the others
    assert found.correct == (red == labels).sum()
    assert found.confusion.sum() == examples


@pytest.mark.parametrize(("image_size", "at_once"), [(18, 9), (64, 1)])
def test_larger_images_come_in_smaller_batches(towers, monkeypatch, image_size, at_once):
    monkeypatch.setattr(evaluator, "MAX_BATCH_PIXELS", 3 * 32 * 32)
    seen = []
    images = keras.Input((image_size, image_size, 3))
    x = keras.layers.Lambda(lambda x: seen.append(x.shape[0]) or x)(images)
    model = keras.Model(images, keras.layers.GlobalMaxPooling2D()(x))
    levels = np.zeros((10, image_size, image_size, 3), np.uint8)
    logits = Classifier(model, towers(1), Augmentation()).logits(levels, [], [])

    assert {*seen} - {None} == {at_once}
    assert logits.plain.shape == (10, 3)


def test_tta_scores_the_mean_logits_of_its_views(towers, reader):
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    kernel = np.random.default_rng(1).normal(size=(1, 10)).astype("f4")
    classifier = Classifier(reader, towers(2), Augmentation())
    found = classifier.logits(images, [tf.constant(kernel)], [], tta=True)
    without = classifier.logits(images, [tf.constant(kernel)], [])
    levels = ((images / 255 - 0.4914) / 0.2470)[..., 0]
    padded = np.pad(levels, [(0, 0), (1, 1), (1, 1)], "reflect")
    views = [(0.25, levels), (0.125, padded[:, :32, :32]), (0.125, padded[:, 2:, 2:])]
    red = sum(share * (view[:, 0, 0] + view[:, 0, -1]) for share, view in views)

    np.testing.assert_allclose(found.tta, red[:, None] * kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.plain, without.plain)


def test_two_sets_of_mirrored_weights_are_two(towers):
    two = towers(2)
    with make_strategy(two).scope():
        images = keras.Input((32, 32, 3))
        logits = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(images))
        model = keras.Model(images, logits)
        weights = [v.value for v in model.trainable_variables]
        average = [tf.Variable(2 * v) for v in weights]
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    classifier = Classifier(model, two, Augmentation())
    one = classifier.logits(images, weights, []).plain
    other = classifier.logits(images, average, []).plain

    np.testing.assert_allclose(other, 2 * one, rtol=1e-5)
