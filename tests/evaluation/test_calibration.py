import contextlib

import keras
import numpy as np
import pytest

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import Split
from cifar_towers.evaluation import score
from cifar_towers.evaluation.evaluator import make_classify_fn, score_split
from cifar_towers.evaluation.score import Evaluation, Score, fit_temperature, scale_temperature
from cifar_towers.reporting.run_logger import evaluation_record
from cifar_towers.training.distributed_step import make_strategy


def random_net(count=400, classes=10, seed=0):
    """Return labels that follow softmax(z), and the logits z."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(count, classes))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return (shares.cumsum(1) < rng.random((count, 1))).sum(1).clip(max=classes - 1), logits


def mean_nll(labels, logits):
    return np.mean([np.log(np.exp(row - row[label]).sum()) for row, label in zip(logits, labels, strict=True)])


def logits_of(*rows):
    return np.log(np.maximum(rows, 1e-300))


@pytest.mark.parametrize(
    ("labels", "logits", "filled", "ece"),
    [
        # one bin: half of two images right at a confidence of 0.9
        ([0, 1], logits_of([0.9, 0.1], [0.9, 0.1]), {13: 2}, 0.4),
        # three bins of 1, 2 and 1 images: |1 - 0.7| / 4 + |1 - 1.5| / 4 + |0 - 0.95| / 4
        ([0, 1, 0, 1], logits_of([0.7, 0.3], [0.25, 0.75], [0.25, 0.75], [0.95, 0.05]), {10: 1, 11: 2, 14: 1}, 0.4375),
        # a confidence of exactly 3 / 15, 5 / 15 or 1 / 15 belongs to the bin below the edge
        ([0, 1, 2, 3, 4], np.zeros((5, 5)), {2: 5}, 0.0),
        ([0, 0], np.zeros((2, 3)), {4: 2}, 2 / 3),
        ([1], np.zeros((1, 15)), {0: 1}, 1 / 15),
        # exactly 1
        ([0, 0, 0, 1], np.array([[2000.0, 0.0]] * 4), {14: 4}, 0.25),
        # all of one class, and predicted as another
        ([1, 1, 1], logits_of(*[[0.8, 0.1, 0.1]] * 3), {11: 3}, 0.8),
    ],
    ids=["one bin", "three bins", "3/15", "5/15", "1/15", "certain", "one class"],
)
def test_expected_calibration_error_by_hand(labels, logits, filled, ece):
    found = Score(np.array(labels), logits)
    assert {bin: int(count) for bin, count in enumerate(found.reliability[0]) if count} == filled
    assert found.ece == pytest.approx(ece, abs=1e-12)
    assert found.reliability.shape == (3, 15) and found.reliability[1].sum() == found.correct


def test_logits_that_are_not_finite_have_no_calibration():
    labels, logits = random_net(20)
    found = Score(labels, np.where(np.arange(20)[:, None] == 3, np.nan, logits))
    assert np.isnan(found.ece) and scale_temperature(found)["temperatures"].count(None) == 1
    assert scale_temperature(found)["loss"] is scale_temperature(found)["ece"] is None


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_temperature_of_logits_that_were_scaled_is_found(classes):
    labels, logits = random_net(classes=classes)
    whole, grid = fit_temperature(labels, logits), np.geomspace(0.5, 2, 201)
    best = grid[np.argmin([mean_nll(labels[:50], logits[:50] / each) for each in grid])]
    assert grid[0] < best < grid[-1]
    for factor in (1e-3, 0.4, 1.0, 2.5, 1e3):
        assert fit_temperature(labels, factor * logits) == pytest.approx(factor * whole, rel=1e-8)
        assert fit_temperature(labels[:50], factor * logits[:50]) == pytest.approx(factor * best, rel=0.01)
    assert fit_temperature(*random_net(20_000, classes)) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("labels", "logits"),
    [
        ([0, 1], np.eye(2)),
        ([0, 1], np.zeros((2, 2))),
        ([1, 0], np.eye(2)),
        ([0, 1], np.array([[1.0, np.inf], [0.0, 1.0]])),
        ([0, 1, 1], np.array([[1.0, -np.inf, 0.0], [0.0, 1.0, 0.0], [2.0, 1.0, 0.0]])),
        ([], np.zeros((0, 2))),
    ],
    ids=["all are right", "nothing is told", "worse than chance", "infinity", "minus infinity", "no images"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_there_is_no_temperature_without_a_minimum(labels, logits):
    assert fit_temperature(np.array(labels, int), logits) is None


@pytest.mark.parametrize("labels", [np.arange(41) % 2, np.arange(41) // 21], ids=["alternating", "sorted"])
def test_no_image_is_fitted_on_and_reported_on(monkeypatch, labels):
    """The logits hold the index of the image. Each half has images of both classes in any order."""
    logits, fitted, reported = np.arange(1, 42)[:, None] * np.array([[1.0, 2.0]]), [], []

    def fit(labels, logits):
        fitted.append({int(index) for index in logits[:, 0]})
        assert set(labels) == {0, 1}
        return 10.0 ** len(fitted)

    found = Score(labels, logits)
    monkeypatch.setattr(score, "fit_temperature", fit)
    monkeypatch.setattr(score, "Score", lambda _, scaled: (reported.append(scaled), found)[1])
    record = scale_temperature(found)
    assert record["temperatures"] == [10.0, 100.0] and record["fitted_on"] == "the other half of the images"
    assert not fitted[0] & fitted[1] and fitted[0] | fitted[1] == set(range(1, 42))
    assert {len(half) for half in fitted} == {20, 21}
    for index, (scaled, _) in enumerate(reported[0], 1):
        (number,) = (number for number, half in enumerate(fitted, 1) if index not in half)
        assert scaled == pytest.approx(index / 10**number)


def test_scaled_values_of_halves_are_over_all_images():
    labels, logits = random_net()
    record = scale_temperature(Score(labels, 3 * logits))
    halves = np.random.Generator(np.random.Philox(key=0)).permutation(400) % 2
    scaled = 3 * logits / np.where(halves, record["temperatures"][1], record["temperatures"][0])[:, None]
    assert record["loss"] == pytest.approx(mean_nll(labels, scaled), abs=1e-9)
    assert record["ece"] == pytest.approx(Score(labels, scaled).ece, abs=1e-9)
    assert record["loss"] < Score(labels, 3 * logits).loss


def test_test_images_have_the_temperature_of_validation_images_with_the_same_weights_and_views():
    def evaluation(split, weights, tta, factor, seed):
        labels, logits = random_net(seed=seed)
        return Evaluation(split, weights, tta, Score(labels, factor * logits))

    kinds = ("raw", 0, 1.0), ("ema", 0, 2.0), ("ema", 2, 4.0)
    validation = [evaluation("validation", *kind, seed=0) for kind in kinds]
    test = [evaluation("test", *kind, seed=1) for kind in kinds]
    base = fit_temperature(*random_net())
    for each, (*_, factor) in zip(test, kinds, strict=True):
        record = evaluation_record(each, [*validation, *test])["temperature_scaling"]
        assert record["temperatures"] == pytest.approx([factor * base]) and record["fitted_on"] == "validation images"
        alone = evaluation_record(each, test)["temperature_scaling"]
        assert len(alone["temperatures"]) == 2 and alone["fitted_on"] == "the other half of the images"
    own = evaluation_record(validation[0], [*validation, *test])["temperature_scaling"]
    assert len(own["temperatures"]) == 2  # never its own temperature


@pytest.mark.parametrize("mirrored", [False, True])
def test_calibration_is_the_same_on_several_towers(towers, mirrored):
    rng = np.random.default_rng(0)
    images, guesses = rng.integers(0, 256, (101, 8, 8, 3), np.uint8), rng.integers(0, 10, 101)
    weights = [0.02 * rng.normal(size=(192, 10)), np.zeros(10)]

    def records(count):
        devices = towers(count)
        with make_strategy(devices).scope() if mirrored and count > 1 else contextlib.nullcontext():
            inputs = keras.Input((8, 8, 3))
            model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs)))
        model.set_weights(weights)
        classify, values = (
            make_classify_fn(model, devices, Augmentation()),
            [v.value for v in model.trainable_variables],
        )
        predicted = classify(images, values, [])[0].argmax(1)
        split = Split(images, np.where(np.arange(101) % 3, predicted, guesses))
        scores = score_split(classify, split, values, [], 2)
        return [evaluation_record(Evaluation("test", "raw", tta, each), []) for tta, each in scores.items()]

    for one, several in zip(records(1), records(3), strict=True):
        assert several["ece"] == pytest.approx(one["ece"], abs=1e-6)
        np.testing.assert_allclose(several["reliability"], one["reliability"], atol=1e-5)
        for key in ("loss", "ece", "temperatures"):
            assert several["temperature_scaling"][key] == pytest.approx(one["temperature_scaling"][key], abs=1e-5)
