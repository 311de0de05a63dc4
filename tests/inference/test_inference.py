"""Prediction and evaluation of trained runs, also with models and data of the user's own."""

import json
import shutil
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers import hardware
from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig, PredictConfig, TrainedRunConfig
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import split_validation
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import predict
from cifar_towers.inference.evaluate import evaluate_checkpoint
from cifar_towers.inference.predict import TrainedModel, predict_images
from cifar_towers.inference.run import Run
from tests.own_data import write_arrays, write_folder
from tests.runs.short_runs import run as train
from tests.runs.short_runs import small_runs

SMALL = synthetic.make(400, 0, 0), synthetic.make(200, 0, 1)
CONFIG = TrainConfig(
    num_gpus=2, dataset="synthetic", model="cifarnet", crop=24, shift=0, batch_size=100, epochs=2, precision="float32",
    learning_rate=0.05, momentum=0.0, ema_decay=0.5, summary_every_steps=0, eval_every_epochs=0.0,
    checkpoint_every_steps=5,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def small_set():
    with small_runs(*SMALL):
        yield


def predict_with(run, *pictures, **settings):
    predict_images(PredictConfig(train_dir=str(run), pictures=tuple(map(str, pictures)), **settings))


def predicted_probabilities(run, images, **settings):
    config = PredictConfig(train_dir=str(run), pictures=("images",), precision="float32", **settings)
    return predict.predict_probabilities(config, images)


def config_of(run, **settings):
    return EvaluateConfig(train_dir=str(run), **{"num_gpus": 1, "precision": "float32"} | settings)


def evaluate_as_json(run, **settings):
    return json.loads(evaluate_checkpoint(config_of(run, json=True, **settings)))


@cache
def own_record(run):
    """Return the record of an evaluation on the run's own test images."""
    return evaluate_as_json(run)


@cache
def expected_probabilities(run):
    """Compute the probabilities of the test images with averaged weights, on no towers."""
    trained = TrainedModel(TrainedRunConfig(train_dir=str(run)))
    images = trained.augmentation.evaluate(tf.constant(SMALL[1].images))
    return tf.nn.softmax(trained.model(images, training=False)).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run that holds out 100 images, and return its directory."""
    directory = tmp_path_factory.mktemp("using") / "run"
    train(CONFIG, train_dir=str(directory), validation_examples=100, tta=2)
    return directory


def copy_of(run, place, **changed):
    """Copy a run, with other values in its config.json."""
    config = shutil.copytree(run, place) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    return place


@pytest.fixture
def folder(tmp_path):
    """Write some test images, and beside them a text, a hidden picture, and a picture in a subfolder."""
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for index, name in enumerate(("0", "1", "2", "3", "4", "more/5", ".6")):
        Image.fromarray(SMALL[1].images[index]).save(tmp_path / "pictures" / f"{name}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


# Prediction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [predict.BATCH_SIZE, 2])
def test_predicted_probabilities_are_those_of_the_model(run, folder, capsys, monkeypatch, batch_size):
    monkeypatch.setattr(predict, "BATCH_SIZE", batch_size)
    predict_with(run, folder, num_gpus=2, precision="float32", json=True)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [answer["picture"].removeprefix(str(folder)) for answer in answers]
    assert names == ["/0.png", "/1.png", "/2.png", "/3.png", "/4.png"]
    for answer, probabilities in zip(answers, expected_probabilities(run)[:5], strict=True):
        top = np.argsort(-probabilities)[:3]
        assert answer["class"] == synthetic.CLASSES[top[0]]
        assert list(answer["probabilities"]) == [synthetic.CLASSES[index] for index in top]
        np.testing.assert_allclose(list(answer["probabilities"].values()), probabilities[top], atol=1e-5)
    for images in (SMALL[1].images[:5], folder, sorted(folder.glob("[0-9].png"))):
        found = predicted_probabilities(run, images)
        np.testing.assert_allclose(found, expected_probabilities(run)[:5], atol=1e-5)
    predict_with(run, folder, tta=2)
    assert [line.count(" %") for line in capsys.readouterr().out.splitlines()] == [3] * 5


def test_pictures_that_cannot_be_read_are_named(run, folder, tmp_path):
    (folder / "9.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    for pictures, error, message in (
        (folder, DataError, "9.png cannot be read as an image"),
        (tmp_path / "nowhere.png", DataError, "nowhere.png cannot be read"),
        (tmp_path / "empty", UsageError, "empty contains no pictures"),
        (SMALL[1].images / 255, UsageError, r"float64; give uint8 \[n, 32, 32, 3\]"),
        (SMALL[1].images[:, :30], UsageError, r"\(200, 30, 32, 3\) uint8; give uint8 \[n, 32, 32, 3\]"),
    ):
        with pytest.raises(error, match=message):
            predicted_probabilities(run, pictures)
    with pytest.raises(UsageError, match="which images"):
        PredictConfig(train_dir=str(run))


def test_logits_that_are_not_finite_have_no_class_and_no_score(run, monkeypatch):
    make = predict.make_classify_fn

    def make_overflowing(*args, **settings):
        classify = make(*args, **settings)
        return lambda *inputs: [
            np.where(np.arange(len(each))[:, None] == 1, np.inf, each) for each in classify(*inputs)
        ]

    monkeypatch.setattr(predict, "make_classify_fn", make_overflowing)
    for use in (evaluate_as_json, partial(predicted_probabilities, images=SMALL[1].images[:3])):
        with pytest.raises(DataError, match=f"{run} gives some images logits that are not finite"):
            use(run)


# Evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tta", [0, 2])
def test_evaluation_gives_what_training_stored_and_what_predictions_say(run, tta):
    record = evaluate_as_json(run, tta=tta, num_gpus=2)
    stored = json.loads((run / "result.json").read_text())["evaluations"]
    (same,) = (s for s in stored if (s["split"], s["weights"], s["tta"]) == ("test", "ema", tta))
    for key in ("count", "accuracy", "confusion"):
        assert record[key] == same[key]
    assert (record["loss"], record["ece"]) == pytest.approx((same["loss"], same["ece"]), abs=1e-6)
    probabilities, labels = predicted_probabilities(run, SMALL[1].images, tta=tta), SMALL[1].labels
    assert record["loss"] == pytest.approx(-np.log(probabilities[np.arange(200), labels]).mean(), abs=1e-6)
    assert record["correct"] == (probabilities.argmax(1) == labels).sum()
    held_out = evaluate_as_json(run, tta=tta, split="validation")
    expected = predicted_probabilities(run, (split := split_validation(SMALL[0], 100)[1]).images, tta=tta)
    assert (held_out["count"], held_out["correct"]) == (100, (expected.argmax(1) == split.labels).sum())
    low, high = record["interval95"]
    assert 0 < low < record["accuracy"] < high < 1 and not record["changed_data"]


def test_evaluation_names_the_class_that_errors_go_to(run):
    title, scores, _, *table = evaluate_checkpoint(config_of(run)).splitlines()
    assert title == f"{run} at step 6: synthetic test, ema weights, TTA 0, float32"
    record = own_record(run)
    assert f"({record['correct']} of 200; 95 % interval " in scores and f"ECE {record['ece']:.4f}" in scores
    assert table[0].split("  ")[-1] == "most often taken for"
    confusion = np.array(record["confusion"])
    np.fill_diagonal(confusion, 0)
    for line, row in zip(table[1:], confusion, strict=True):
        expected = f"{synthetic.CLASSES[row.argmax()]} ({row.max()})" if row.any() else "-"
        assert line.endswith(f"  {expected}")


def test_precision_of_a_run_in_float32_is_float32_also_where_bfloat16_is_faster(run, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "processor_features", lambda: {"amx_bf16"})
    assert evaluate_as_json(run, precision="auto") == own_record(run)
    other = evaluate_as_json(run, precision="bfloat16")
    assert other["precision"] == "bfloat16" and other["loss"] != own_record(run)["loss"]
    train(CONFIG, tmp_path / "run", precision="bfloat16", max_steps=1, batch_size=10)
    assert evaluate_as_json(tmp_path / "run", num_images=20, precision="auto")["precision"] == "bfloat16"


# The run ------------------------------------------------------------------------------------------------------------


def test_checkpoint_is_chosen_by_its_step_and_weights_by_their_name(run):
    steps = [int(path.name.removeprefix("step-").removesuffix(".npz")) for path in list_checkpoints(run)]
    assert steps == [5, 6] and own_record(run)["step"] == 6
    assert evaluate_as_json(run, step=5)["step"] == 5
    raw = evaluate_as_json(run, weights="raw")
    assert raw["weights"] == "raw" and raw["loss"] != own_record(run)["loss"]
    with pytest.raises(UsageError, match="has no checkpoint of step 999"):
        evaluate_as_json(run, step=999)


def test_a_directory_without_a_run_or_its_checkpoints_or_average_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="is not the directory of a run: it has no config.json"):
        evaluate_as_json(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no checkpoint in"):
        evaluate_as_json(tmp_path)
    without = copy_of(run, tmp_path / "without", ema_decay=0.0)
    with pytest.raises(UsageError, match="has no moving average of its weights; give --weights=raw"):
        evaluate_as_json(without, weights="ema")


def test_own_model_is_executed_only_if_the_user_names_it(run, tmp_path):
    evil = f"{tmp_path / 'evil.py'}:net"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    copy = copy_of(run, tmp_path / "sent", model=evil)
    for use in (partial(evaluate_as_json, copy), partial(predict_with, copy, "a.png")):
        with pytest.raises(UsageError, match=f"code that must be executed; if you trust it, give --model={evil}"):
            use()
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UsageError):
        predict_with(copy, "a.png", model=evil)
    assert (tmp_path / "executed").exists()


NETS = """
import keras
from keras import layers

def net(num_classes):
    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, 2)(images)))
    x = layers.GlobalAveragePooling2D()(layers.Dropout(0.2)(x))
    return keras.Model(images, layers.Dense(num_classes, kernel_regularizer=keras.regularizers.L2(1e-3))(x))

def sequential():
    body = keras.Sequential([layers.Input((32, 32, 3)), layers.Conv2D(4, 3, 4, activation="relu"), layers.Flatten()])
    return keras.Sequential([body, layers.Dense(10, kernel_constraint="non_neg")])
"""


@pytest.fixture
def own(tmp_path):
    """own(name): the configuration of a run with a net of the user's own."""
    (tmp_path / "nets.py").write_text(NETS)
    settings = {"crop": 0, "ema_decay": 0.0, "train_dir": str(tmp_path / "own")}
    return lambda name="net": replace(CONFIG, model=f"{tmp_path / 'nets.py'}:{name}", **settings)


def test_own_model_is_trained_resumed_and_used(own, tmp_path, folder):
    result = train(own())
    resumed = replace(own(), train_dir=str(tmp_path / "resumed"))
    train(resumed, max_steps=3)
    assert train(resumed)["weights_sha256"] == result["weights_sha256"]  # dropout's numbers follow from the step
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "nets.py").rename(tmp_path / "elsewhere" / "nets.py")
    model, directory = f"{moved}:net", tmp_path / "own"
    assert evaluate_as_json(directory, model=model)["accuracy"] == result["evaluations"][-1]["accuracy"]
    predict_with(directory, folder / "0.png", model=model)
    with pytest.raises(KeyError, match=r"model.sequential.conv2d.kernel"):
        evaluate_as_json(directory, model=f"{moved}:sequential")


# Its data, and others -------------------------------------------------------------------------------------------------


def test_own_folder_is_evaluated_where_it_is_now_and_not_if_it_changed(tmp_path):
    splits = {"train": SMALL[0].take(slice(150)), "test": SMALL[1].take(slice(150))}
    data = write_folder(tmp_path / "set", **splits)
    config = replace(CONFIG, dataset=data, batch_size=50, train_dir=str(tmp_path / "mine"))
    accuracy = train(config)["evaluations"][-1]["accuracy"]
    assert Run(tmp_path / "mine").class_names == sorted(synthetic.CLASSES)
    assert evaluate_as_json(config.train_dir)["accuracy"] == accuracy
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = evaluate_as_json(config.train_dir, dataset=f"folder:{tmp_path / 'moved'}")
    assert (moved["accuracy"], moved["changed_data"]) == (accuracy, False)
    (tmp_path / "moved").rename(tmp_path / "set")
    next((tmp_path / "set" / "test").glob("*/*.png")).unlink()
    for named in ("", data):
        with pytest.raises(DataError, match=r"other test images than .* give --allow_changed_data to evaluate on the"):
            evaluate_as_json(config.train_dir, dataset=named)
    permitted = config_of(config.train_dir, allow_changed_data=True)
    assert "test (another set than in training), ema weights" in evaluate_checkpoint(permitted)


def test_other_sets_are_scored_by_the_names_of_their_classes(run, tmp_path):
    """They have some of the run's classes, in any order."""
    own, few = np.array(own_record(run)["confusion"]), SMALL[1].labels < 4
    data = write_arrays(tmp_path / "set", test=SMALL[1].take(few))
    record = evaluate_as_json(run, dataset=data)
    assert (record["count"], record["changed_data"]) == (few.sum(), True)
    np.testing.assert_array_equal(record["confusion"][:4], own[:4])
    assert not np.any(record["confusion"][4:]) and record["per_class"][synthetic.CLASSES[9]] is None
    names = SMALL[1].info._replace(class_names=tuple(f"my {name}" for name in synthetic.CLASSES))
    others = write_arrays(tmp_path / "others", test=replace(SMALL[1], info=names))
    with pytest.raises(DataError, match="was trained on striped disc, .* and the data have my "):
        evaluate_as_json(run, dataset=others)
    with pytest.raises(UsageError, match="no train examples"):
        evaluate_as_json(run, dataset=data, split="train")
