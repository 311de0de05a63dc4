"""Prediction and evaluation of trained runs, also with models and data of the user's own."""

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers import hardware
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import (
    ComputeConfig,
    EvaluateConfig,
    PredictConfig,
    TrainedRunConfig,
)
from cifar_towers.data import sources, synthetic
from cifar_towers.data.sources import split_validation
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import predict
from cifar_towers.inference.evaluate import evaluate_checkpoint, format_evaluation
from cifar_towers.inference.predict import TrainedModel, predict_images, predict_probabilities
from cifar_towers.runs.checkpoint import list_checkpoints
from examples import corruptions
from tests.helpers import nets
from tests.helpers.configs import TINY_NET
from tests.helpers.short_runs import run as train
from tests.helpers.short_runs import small_runs
from tests.helpers.user_data import write_arrays, write_folder

TRAIN = synthetic.make(400, 0, 0)
TEST = synthetic.make(200, 0, 1)
CONFIG = TrainConfig(
    num_gpus=2,
    dataset="synthetic",
    model="cifarnet",
    crop=24,
    shift=0,
    batch_size=50,
    epochs=2,
    precision="float32",
    learning_rate=0.05,
    momentum=0.0,
    ema_decay=0.5,
    summary_every_steps=0,
    eval_every_epochs=0.0,
    checkpoint_every_steps=5,
)


@pytest.fixture(autouse=True, scope="module")
def small_set():
    with small_runs(TRAIN, TEST):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run that holds out 100 images, and return its directory."""
    directory = tmp_path_factory.mktemp("using") / "run"
    train(CONFIG, directory, validation_examples=100, tta=True)
    return directory


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    """Enter a directory with some test images, with files that are none, and with parts of runs."""
    monkeypatch.chdir(tmp_path)
    for place in ("pictures/more", "broken", "empty", "unsaved"):
        Path(place).mkdir(parents=True)
    for index, name in enumerate(("0", "1", "2", "3", "4", "more/5", ".6")):
        Image.fromarray(TEST.images[index]).save(f"pictures/{name}.png")
    for path in ("pictures/notes.txt", "broken/9.png"):
        Path(path).write_text("no picture")
    Path("unsaved/config.json").write_text("{}")
    copy_of(run, "whole", ema_decay=0.0)
    copy_of(run, "moved", augment="nowhere.py:own")


def copy_of(run, place, **changed):
    """Copy a run, with other values in its config.json."""
    config = Path(shutil.copytree(run, place), "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    return place


def predicted(run, images, **settings):
    config = ComputeConfig(train_dir=str(run), num_gpus=1, precision="float32", **settings)
    return predict_probabilities(config, images)


def config_of(run, **settings):
    return EvaluateConfig(train_dir=str(run), **{"num_gpus": 1, "precision": "float32"} | settings)


def evaluated(run, **settings):
    return evaluate_checkpoint(config_of(run, **settings))


@cache
def own_record(run):
    """Return the record of an evaluation on the run's own test images."""
    return evaluated(run)


def test_predictions_are_those_of_the_model_with_averaged_weights(run, here, capsys, monkeypatch):
    """In batches of two pictures; hidden pictures, other files and subfolders are left out."""
    monkeypatch.setattr(predict, "BATCH_SIZE", 2)
    settings = {"num_gpus": 2, "precision": "float32", "json": True}
    predict_images(PredictConfig(train_dir=str(run), pictures=("pictures",), **settings))
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    expected = [f"pictures/{index}.png" for index in range(5)]
    assert [answer["picture"] for answer in answers] == expected

    trained = TrainedModel(TrainedRunConfig(train_dir=str(run)))
    images = trained.augmentation.evaluate(tf.constant(TEST.images[:5]))
    expected = tf.nn.softmax(trained.model(images, training=False)).numpy()
    for answer, probabilities in zip(answers, expected, strict=True):
        top = np.argsort(-probabilities)[:3]
        assert answer["class"] == synthetic.CLASSES[top[0]]
        assert list(answer["probabilities"]) == [synthetic.CLASSES[index] for index in top]
        found = list(answer["probabilities"].values())
        np.testing.assert_allclose(found, probabilities[top], atol=1e-5)


def test_pictures_are_answered_also_beside_others_that_cannot_be_read(run, here, capsys):
    """All of those are named, and a pipe is not waited for."""
    os.mkfifo("pipe.png")
    pictures = ("broken/9.png", "pictures/1.png", "pipe.png", "pictures/2.png")
    config = PredictConfig(train_dir=str(run), num_gpus=1, precision="float32", pictures=pictures)
    with pytest.raises(DataError, match="broken/9.png .*pipe.png .*not a regular file"):
        predict_images(config)
    answered = [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert answered == ["pictures/1.png", "pictures/2.png"]


@pytest.mark.parametrize(
    ("use", "error", "named"),
    [
        (lambda run: predicted(run, "broken"), DataError, "9.png"),
        (lambda run: predicted(run, "nowhere.png"), DataError, "nowhere.png"),
        (lambda run: predicted(run, "empty"), UsageError, "empty"),
        (lambda run: predicted(run, TEST.images / 255), UsageError, "float64"),
        (lambda run: predicted(run, TEST.images[:, :30]), UsageError, r"\(200, 30, 32, 3\)"),
        (lambda run: PredictConfig(train_dir=str(run)), UsageError, "images"),
        (lambda run: evaluated(run, step=999), UsageError, "999"),
        (lambda run: evaluated("empty"), UsageError, "config.json"),
        (lambda run: evaluated("unsaved"), UsageError, "unsaved"),
        (lambda run: evaluated("whole", weights="ema"), UsageError, "--weights=raw"),
        (lambda run: evaluated(run, model="resnet20"), UsageError, "another model"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(run, here, use, error, named):
    with pytest.raises(error, match=named):
        use(run)


@pytest.mark.parametrize("use", [evaluated, lambda run: predicted(run, TEST.images[:3])])
def test_logits_that_are_not_finite_have_no_class_and_no_score(run, monkeypatch, use):
    class Overflowing(predict.Classifier):
        def logits(self, *inputs):
            found = super().logits(*inputs)
            found.plain[1] = np.inf
            return found

    monkeypatch.setattr(predict, "Classifier", Overflowing)
    with pytest.raises(DataError, match=str(run)):
        use(run)


@pytest.mark.parametrize(
    ("split", "tta", "num_gpus"), [("test", False, 2), ("test", True, 1), ("validation", False, 1)]
)
def test_evaluation_gives_what_training_stored_and_what_predictions_say(run, split, tta, num_gpus):
    record = evaluated(run, split=split, tta=tta, num_gpus=num_gpus)
    stored = json.loads((run / "result.json").read_text())["evaluations"]
    kind = (split, "ema", tta)
    matching = [one for one in stored if (one["split"], one["weights"], one["tta"]) == kind]
    (same,) = matching

    for key in ("count", "accuracy", "confusion"):
        assert record[key] == same[key]

    assert (record["loss"], record["ece"]) == pytest.approx((same["loss"], same["ece"]), abs=1e-6)

    data = TEST if split == "test" else split_validation(TRAIN, 100)[1]
    probabilities = predicted(run, data.images, tta=tta)
    of_labels = np.take_along_axis(probabilities, data.labels[:, None], 1)

    assert record["loss"] == pytest.approx(-np.log(of_labels).mean())
    assert record["correct"] == (probabilities.argmax(1) == data.labels).sum()

    low, high = record["interval95"]
    assert 0 < low < record["accuracy"] < high < 1
    assert not record["changed_data"]


def test_a_run_is_used_without_its_augmentation(run, here):
    assert predicted("moved", TEST.images[:3]).tolist() == predicted(run, TEST.images[:3]).tolist()


def test_table_names_the_class_that_errors_go_to(run):
    table = format_evaluation(own_record(run)).splitlines()[-10:]
    confusion = np.array(own_record(run)["confusion"])
    np.fill_diagonal(confusion, 0)
    for line, row in zip(table, confusion, strict=True):
        errors = f"{synthetic.CLASSES[row.argmax()]} ({row.max()})" if row.any() else "-"
        assert line.endswith(f"  {errors}")


def test_a_run_in_float32_is_evaluated_so_also_where_bfloat16_is_faster(run, monkeypatch):
    monkeypatch.setattr(hardware, "processor_features", lambda: {"amx_bf16"})
    assert evaluated(run, precision="auto") == own_record(run)
    other = evaluated(run, precision="bfloat16")
    assert other["precision"] == "bfloat16"
    assert other["loss"] != own_record(run)["loss"]


def test_checkpoint_is_chosen_by_its_step_and_weights_by_their_name(run):
    assert {"step-10.npz", "step-12.npz"} <= {path.name for path in list_checkpoints(run)}
    assert own_record(run)["step"] == 12
    assert evaluated(run, step=10)["step"] == 10
    raw = evaluated(run, weights="raw")
    assert raw["weights"] == "raw"
    assert raw["loss"] != own_record(run)["loss"]


def test_own_model_is_executed_only_if_the_user_names_it_wherever_it_is_now(tmp_path):
    file = tmp_path / "nets.py"
    moved = tmp_path / "moved.py"
    executed = tmp_path / "executed"
    file.write_text(f"{Path(nets.__file__).read_text()}\nopen({str(executed)!r}, 'w')\n")
    config = replace(
        CONFIG, model=f"{file}:tiny", crop=0, num_gpus=1, train_dir=str(tmp_path / "own")
    )
    accuracy = train(config)["evaluations"][-1]["accuracy"]
    executed.unlink()
    for use in (evaluated, lambda run: predicted(run, TEST.images)):
        with pytest.raises(UsageError, match=f"--model={file}:tiny"):
            use(config.train_dir)

    assert not executed.exists()

    file.rename(moved)
    assert evaluated(config.train_dir, model=f"{moved}:tiny")["accuracy"] == accuracy
    assert executed.exists()


def test_layers_derive_values_from_restored_variables(tmp_path):
    """A `Normalization` that the net adapts in the process that trains, and only there."""
    file = tmp_path / "nets.py"
    trained = tmp_path / "trained"
    file.write_text(
        f"""{Path(nets.__file__).read_text()}
import pathlib
import numpy as np

def adapted(image_size, num_classes):
    images = keras.Input((image_size, image_size, 3))
    normalization = layers.Normalization()
    x = normalization(images)
    if not pathlib.Path({str(trained)!r}).exists():
        normalization.adapt(np.random.default_rng(0).normal(2, 3, [9, 24, 24, 3]))
    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(x)))
"""
    )
    config = replace(
        CONFIG, model=f"{file}:adapted", crop=0, num_gpus=1, train_dir=str(tmp_path / "run")
    )
    loss = train(config)["evaluations"][-1]["loss"]
    trained.touch()
    evaluation = evaluated(config.train_dir, model=config.model)
    started = replace(
        config, init_from=config.train_dir, learning_rate=0.0, train_dir=str(tmp_path / "started")
    )
    last = train(started)["evaluations"][-1]

    assert [evaluation["loss"], last["loss"]] == pytest.approx([loss, loss], rel=1e-5)


# Its data, and others -----------------------------------------------------------------------------


def test_own_folder_is_evaluated_where_it_is_now_and_not_if_it_changed(tmp_path):
    place = tmp_path / "set"
    moved = tmp_path / "moved"
    data = write_folder(place, train=TRAIN.take(slice(150)), test=TEST.take(slice(150)))
    config = replace(
        CONFIG, model=TINY_NET, dataset=data, crop=0, num_gpus=1, train_dir=str(tmp_path / "mine")
    )
    accuracy = train(config)["evaluations"][-1]["accuracy"]
    record = evaluated(config.train_dir, model=TINY_NET)

    assert record["accuracy"] == accuracy
    assert [*record["per_class"]] == sorted(synthetic.CLASSES)

    place.rename(moved)
    record = evaluated(config.train_dir, model=TINY_NET, dataset=f"folder:{moved}")

    assert (record["accuracy"], record["changed_data"]) == (accuracy, False)

    moved.rename(place)
    next((place / "test").glob("*/*.png")).unlink()
    for named in ("", data):
        with pytest.raises(DataError, match="--allow_changed_data"):
            evaluated(config.train_dir, model=TINY_NET, dataset=named)
    record = evaluated(config.train_dir, model=TINY_NET, allow_changed_data=True)

    assert (record["count"], record["changed_data"]) == (149, True)


def test_other_sets_are_scored_by_the_names_of_their_classes(run, tmp_path):
    """They have some of the run's classes, in any order."""
    own = np.array(own_record(run)["confusion"])
    few = TEST.labels < 4
    data = write_arrays(tmp_path / "set", test=TEST.take(few))
    record = evaluated(run, dataset=data)

    assert (record["count"], record["changed_data"]) == (few.sum(), True)
    np.testing.assert_array_equal(record["confusion"][:4], own[:4])
    assert not np.any(record["confusion"][4:])
    assert np.isnan(record["per_class"][synthetic.CLASSES[9]])

    names = tuple(f"my {name}" for name in synthetic.CLASSES)
    renamed = replace(TEST, info=TEST.info._replace(class_names=names))
    others = write_arrays(tmp_path / "others", test=renamed)
    for settings, error, named in (
        ({"dataset": others}, DataError, "my "),
        ({"split": "train"}, UsageError, "train"),
    ):
        with pytest.raises(error, match=named):
            evaluated(run, **{"dataset": data} | settings)


def test_a_part_of_a_split_is_scored(run):
    record = evaluated(run, num_images=20)
    probabilities = predicted(run, TEST.images[:20])
    right = probabilities.argmax(1) == TEST.labels[:20]
    assert (record["count"], record["correct"], record["changed_data"]) == (20, right.sum(), False)


def test_the_example_evaluates_a_run_on_each_set_of_corrupted_images(run, monkeypatch, capsys):
    """The set of severity 3 has only images that the run takes for their class."""
    right = predicted(run, TEST.images).argmax(1) == TEST.labels
    sets = {"1": TEST, "3": TEST.take(right), "5": TEST.take(~right)}

    def find(dataset, data_dir):
        split = sets[dataset[-1]]
        return sources.Source(dataset, lambda image_size, names: {"test": split})

    monkeypatch.setattr(sources, "find", find)
    corruptions.main(run)
    lines = capsys.readouterr().out.splitlines()
    expected = []
    for name in corruptions.CORRUPTIONS:
        expected += [
            f"cifar10_corrupted/{name}_1: {100 * right.mean():.2f} %",
            f"cifar10_corrupted/{name}_3: 100.00 %",
            f"cifar10_corrupted/{name}_5: 0.00 %",
        ]

    assert lines == expected
