"""Prediction, evaluation and export of trained runs, also with models and data of the user's own."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers import devices
from cifar_towers.checkpointing.checkpoint import checkpoint_path, latest_checkpoint, list_checkpoints, read_variables
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig, ExportConfig, PredictConfig
from cifar_towers.data import image_files, sources, synthetic
from cifar_towers.data.dataset import split_validation
from cifar_towers.errors import DataError, RunError, UsageError
from cifar_towers.evaluation import score
from cifar_towers.inference import export, load_run, predict
from cifar_towers.inference.evaluate import evaluate_checkpoint
from cifar_towers.inference.export import export_model
from cifar_towers.inference.predict import predict_images
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


def export_with(run, **settings):
    return export_model(ExportConfig(train_dir=str(run), **settings))


def evaluate_as_json(run, **settings):
    config = EvaluateConfig(train_dir=str(run), json=True, **{"num_gpus": 1} | settings)
    return json.loads(evaluate_checkpoint(config))


@cache
def own_record(run):
    """Return the record of an evaluation on the run's own test images."""
    return evaluate_as_json(run, precision="float32")


@cache
def own_probabilities(run):
    """Return the predicted probabilities of the run's own test images."""
    return predicted_probabilities(run, SMALL[1].images)


def expected_probabilities(run, count):
    """Compute the probabilities of the first test images with averaged weights."""
    opened = load_run.open_run(run)
    images = opened.augmentation.evaluate(tf.constant(SMALL[1].images[:count]))
    return tf.nn.softmax(opened.load("ema", "float32")(images, training=False)).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run and return its directory."""
    directory = tmp_path_factory.mktemp("using") / "run"
    train(CONFIG, train_dir=str(directory))
    return directory


def copy_of(run, place, **changed):
    """Copy a run, with other values in its config.json."""
    config = shutil.copytree(run, place) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    return place


@pytest.fixture
def folder(tmp_path):
    """Write some test images, a file that is no image, and an image in a subfolder, which is not used."""
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for index, name in enumerate(("0", "1", "2", "3", "4", "more/5")):
        Image.fromarray(SMALL[1].images[index]).save(tmp_path / "pictures" / f"{name}.png")
    (tmp_path / "pictures" / "3a.png").write_bytes(b"no picture")
    return tmp_path / "pictures"


# Prediction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [predict.BATCH_SIZE, 2])
def test_predicted_probabilities_are_those_of_evaluation(run, folder, capsys, monkeypatch, batch_size):
    monkeypatch.setattr(predict, "BATCH_SIZE", batch_size)
    with pytest.raises(DataError, match=r"1 of 6 images have no prediction: .*3a.png") as caught:
        predict_with(run, folder, num_gpus=2, precision="float32", json=True)
    assert caught.value.exit_code == 3
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    names = [answer["picture"].removeprefix(str(folder)) for answer in answers]
    assert names == ["/0.png", "/1.png", "/2.png", "/3.png", "/3a.png", "/4.png"]
    assert answers[4]["error"] in err and "3a.png cannot be read as an image" in err
    for answer, probabilities in zip(answers[:4] + answers[5:], expected_probabilities(run, 5), strict=True):
        top = np.argsort(-probabilities)[:3]
        assert answer["class"] == synthetic.CLASSES[top[0]]
        assert list(answer["probabilities"]) == [synthetic.CLASSES[index] for index in top]
        np.testing.assert_allclose(list(answer["probabilities"].values()), probabilities[top], atol=1e-5)


def test_images_whose_logits_are_not_finite_have_no_class_and_no_score(run, folder, capsys, monkeypatch):
    """As in float16, where the weights are large."""
    make = load_run.make_classify_fn

    def make_overflowing(*args, **settings):
        def overflow(images, *others):
            plain, logits, features = classify(images, *others)
            return plain, np.where(np.arange(len(logits))[:, None] == 1, -np.inf, logits), features

        classify = make(*args, **settings)
        return overflow

    monkeypatch.setattr(load_run, "make_classify_fn", make_overflowing)
    (folder / "3a.png").unlink()
    with pytest.raises(DataError, match=r"^1 of 5 images have no prediction: .*1.png$"):
        predict_with(run, folder, json=True)
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert ["class" in answer for answer in answers] == [True, False, True, True, True]
    assert "1.png gets logits that are not finite; if the precision is not float32, give --precision=float32" in err
    with pytest.raises(DataError, match=f"{run} gives some images logits that are not finite; if the precision"):
        evaluate_as_json(run)
    with pytest.raises(DataError, match=f"{run} gives some images logits that are not finite; if the precision"):
        predicted_probabilities(run, SMALL[1].images[:3])


def test_other_files_in_a_folder_are_left_out_and_three_classes_shown(run, folder, capsys):
    (folder / "3a.png").unlink()
    (folder / "phone.heic").write_bytes(b"")
    predict_with(run, folder, tta=2)
    assert [line.count(" %") for line in capsys.readouterr().out.splitlines()] == [3] * 5


def test_hidden_pictures_of_a_folder_are_left_out_and_a_hidden_one_that_is_named_is_not(folder):
    for name in ("._0.png", ".hidden.png"):
        shutil.copy(folder / "0.png", folder / name)
    found = [path.name for path, _ in predict._list_images([folder, folder / ".hidden.png"])]
    assert found == ["0.png", "1.png", "2.png", "3.png", "3a.png", "4.png", ".hidden.png"]


def test_mirrored_views_are_refused_for_a_run_trained_without_mirrored_images(run, tmp_path):
    copy = copy_of(run, tmp_path / "digits", flip="none")
    message = "tta=1 averages over mirrored images, and .*digits was trained without them, .*; give --tta=0$"
    for use, *images in ((evaluate_as_json,), (predict_with, "a.png"), (predicted_probabilities, ["a.png"])):
        with pytest.raises(UsageError, match=message):
            use(copy, *images, tta=1)
    assert load_run.open_run(copy).config.flip == "none"


def test_folders_without_images_are_errors_of_their_own(run, folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    path = (folder / "0.png").rename(folder / "a\n\x1b[31mred.png")
    with pytest.raises(DataError, match="2 of 3 images have no prediction"):
        predict_with(run, tmp_path / "empty", path, tmp_path / ("x" * 300))
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "\x1b" not in out  # control characters are escaped
    assert "empty contains no images" in err and "File name too long" in err
    with pytest.raises(DataError, match="1 of 1 images"):
        predict_with(run, tmp_path)
    assert f"{tmp_path} contains no images" in capsys.readouterr().err
    with pytest.raises(DataError, match="7 of 7 images have no prediction: 0, 1, 2, 3, 4 and 2 more$"):
        predict_with(run, *range(7))
    with pytest.raises(UsageError, match="which images"):
        PredictConfig(train_dir=str(run))


def test_evaluation_names_the_class_that_errors_go_to(run):
    table = evaluate_checkpoint(EvaluateConfig(train_dir=str(run), precision="float32")).splitlines()
    confusion = np.array(own_record(run)["confusion"])
    assert table[4].split("  ")[-1] == "most often taken for"
    np.fill_diagonal(confusion, 0)
    for line, row in zip(table[5:], confusion, strict=True):
        expected = f"{synthetic.CLASSES[row.argmax()]} ({row.max()})" if row.any() else "-"
        assert line.endswith(f"  {expected}")


@pytest.fixture
def with_bfloat16(monkeypatch):
    """Let `--precision=auto` choose bfloat16, as on a processor that has it."""
    monkeypatch.setattr(devices, "resolve_precision", lambda setting, device: (setting.replace("auto", "bfloat16"), ""))


def test_run_in_float32_is_evaluated_and_predicted_in_float32_also_where_bfloat16_is_faster(run, with_bfloat16):
    assert load_run.open_run(run).metadata["precision"] == "float32"
    record = evaluate_as_json(run)
    assert record == evaluate_as_json(run, precision="float32") and record["precision"] == "float32"
    assert evaluate_checkpoint(EvaluateConfig(train_dir=str(run))).splitlines()[0].endswith(", TTA 0, float32")
    other = evaluate_as_json(run, precision="bfloat16")
    assert other["precision"] == "bfloat16" and other["loss"] != record["loss"]
    images = SMALL[1].images[:20]
    for precision, equal in (("auto", True), ("bfloat16", False)):
        config = PredictConfig(train_dir=str(run), pictures=("images",), precision=precision)
        found = predict.predict_probabilities(config, images)
        assert np.allclose(found, expected_probabilities(run, 20), rtol=0, atol=1e-5) == equal


def test_run_in_bfloat16_is_evaluated_in_what_this_machine_computes_faster(tmp_path, with_bfloat16, monkeypatch):
    train(CONFIG, tmp_path / "run", precision="bfloat16", max_steps=1, batch_size=10)
    assert evaluate_as_json(tmp_path / "run", num_images=20)["precision"] == "bfloat16"
    monkeypatch.setattr(devices, "resolve_precision", lambda setting, device: ("float32", ""))
    assert evaluate_as_json(tmp_path / "run", num_images=20)["precision"] == "float32"


# Calibration --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory):
    """Train a run that learns something and holds out 100 images, and return its directory."""
    directory = tmp_path_factory.mktemp("held_out") / "run"
    net = {"model": "speednet_proxy", "crop": 0, "batch_size": 50, "epochs": 6, "learning_rate": 0.1, "momentum": 0.9}
    result = train(CONFIG, train_dir=str(directory), validation_examples=100, tta=2, **net)
    assert 0.3 < result["evaluations"][-1]["accuracy"] < 1
    return directory


@pytest.fixture
def run_without_validation(held_out_run, tmp_path):
    """Make the same run without its held-out images, which are at no other place either."""
    return copy_of(held_out_run, tmp_path / "without", validation_examples=0)


def predicted_probabilities(run, images, **settings):
    config = PredictConfig(train_dir=str(run), pictures=("images",), precision="float32", **settings)
    return predict.predict_probabilities(config, images)


def nll_and_ece(probabilities, labels):
    """Compute both image by image and bin by bin, as C. Guo et al. define them."""
    nll = -np.mean([np.log(row[label]) for row, label in zip(probabilities, labels, strict=True)])
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    ece = 0.0
    for number in range(15):
        inside = (number / 15 < confidence) & (confidence <= (number + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return nll, ece


def scaled(probabilities, temperature):
    """Return softmax(logits / temperature) from softmax(logits)."""
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(1, keepdims=True)


def validation_images():
    return split_validation(SMALL[0], 100)[1]


@pytest.mark.parametrize("tta", [0, 2])
def test_calibration_is_that_of_the_predicted_probabilities(held_out_run, tta):
    """With TTA they are the softmax of the mean logits."""
    record = evaluate_as_json(held_out_run, tta=tta, precision="float32", num_gpus=2)
    of_test = predicted_probabilities(held_out_run, SMALL[1].images, tta=tta)
    labels = SMALL[1].labels
    assert (record["loss"], record["ece"]) == pytest.approx(nll_and_ece(of_test, labels), abs=1e-6)
    scaling = record["temperature_scaling"]
    (temperature,) = scaling["temperatures"]
    assert scaling["fitted_on"] == "validation images"
    assert (scaling["loss"], scaling["ece"]) == pytest.approx(
        nll_and_ece(scaled(of_test, temperature), labels), abs=1e-6
    )
    held_out = validation_images()
    of_held_out = predicted_probabilities(held_out_run, held_out.images, tta=tta)
    losses = [
        nll_and_ece(scaled(of_held_out, factor * temperature), held_out.labels)[0] for factor in (0.999, 1, 1.001)
    ]
    assert losses[1] == min(losses)
    stored = json.loads((held_out_run / "result.json").read_text())["evaluations"]
    (same,) = (s for s in stored if (s["split"], s["weights"], s["tta"]) == ("test", "ema", tta))
    assert same["temperature_scaling"] == {
        key: value if key == "fitted_on" else pytest.approx(value, abs=1e-6) for key, value in scaling.items()
    }
    assert same["ece"] == pytest.approx(record["ece"], abs=1e-6)


def test_evaluation_prints_what_the_temperature_was_fitted_on(held_out_run, run_without_validation):
    def line_of(directory, number=2, **settings):
        config = EvaluateConfig(train_dir=str(directory), precision="float32", **settings)
        return evaluate_checkpoint(config).splitlines()[number]

    record = own_record(held_out_run)
    scaling = record["temperature_scaling"]
    assert line_of(held_out_run, 1).endswith(f" %), loss (NLL) {record['loss']:.4f}")
    assert line_of(held_out_run) == (
        f"calibration: ECE {record['ece']:.4f}; "
        f"with temperature {scaling['temperatures'][0]:.4f}, fitted on validation images: "
        f"NLL {scaling['loss']:.4f}, ECE {scaling['ece']:.4f}"
    )
    halves = r"; with temperature [\d.]+ and [\d.]+, fitted on the other half of the images: NLL [\d.]+, ECE [\d.]+$"
    for line in (
        line_of(run_without_validation),
        line_of(held_out_run, split="validation"),
        line_of(held_out_run, split="train"),
    ):
        assert re.search(halves, line)


def test_evaluation_says_if_no_temperature_fits(held_out_run, monkeypatch):
    monkeypatch.setattr(score, "fit_temperature", lambda *_: None)
    line = evaluate_checkpoint(EvaluateConfig(train_dir=str(held_out_run), precision="float32")).splitlines()[2]
    assert line.endswith(
        "; no temperature can be fitted on validation images: none of the predictions is wrong, or the logits "
        "tell nothing about the classes"
    )
    assert evaluate_as_json(held_out_run)["temperature_scaling"] == {
        "temperatures": [None], "fitted_on": "validation images", "loss": None, "ece": None
    }  # fmt: skip


def test_another_test_set_has_the_temperature_of_the_runs_own_validation_images(held_out_run, tmp_path):
    data = write_arrays(tmp_path, test=SMALL[1].take(slice(80)))
    record = evaluate_as_json(held_out_run, dataset=data, precision="float32")
    own = own_record(held_out_run)["temperature_scaling"]
    assert record["count"] == 80 and record["temperature_scaling"]["fitted_on"] == "validation images"
    assert record["temperature_scaling"]["temperatures"] == pytest.approx(own["temperatures"])


def test_another_set_has_its_own_validation_split_and_the_moved_set_the_held_out_images(tmp_path):
    sets = {"train": SMALL[0], "validation": SMALL[1].take(slice(30)), "test": SMALL[1].take(slice(100, 200))}
    directory, settings = tmp_path / "run", {"precision": "float32", "split": "validation"}
    data = write_arrays(tmp_path / "set", **sets)
    train(CONFIG, directory, dataset=data, validation_examples=100, max_steps=1)
    own = evaluate_as_json(directory, **settings)
    assert own["count"] == 100
    moved = write_arrays(tmp_path / "moved", **sets)
    train_images = evaluate_as_json(directory, precision="float32", split="train")
    for here in (own, train_images):
        there = evaluate_as_json(directory, dataset=moved, precision="float32", split=here["split"])
        assert (there["confusion"], there["changed_data"]) == (here["confusion"], False)
    few = write_arrays(tmp_path / "few", **(sets | {"train": SMALL[0].take(slice(60))}))  # fewer than were held out
    many = write_arrays(tmp_path / "many", **(sets | {"train": SMALL[0].take(slice(300))}))
    for data, number in ((few, 60), (many, 300)):
        other = evaluate_as_json(directory, dataset=data, **settings)
        assert (other["count"], other["changed_data"]) == (30, True)
        assert evaluate_as_json(directory, dataset=data, precision="float32", split="train")["count"] == number
    del sets["validation"]  # held out, as before
    without = write_arrays(tmp_path / "without", **(sets | {"train": SMALL[0].take(slice(300))}))
    assert evaluate_as_json(directory, dataset=without, **settings)["count"] == 100


def test_validation_images_as_another_test_set_do_not_have_the_temperature_fitted_on_them(held_out_run, tmp_path):
    data = write_arrays(tmp_path, test=validation_images())
    for number in (0, 60):
        record = evaluate_as_json(held_out_run, dataset=data, precision="float32", num_images=number)
        assert record["temperature_scaling"]["fitted_on"] == "the other half of the images"


def test_changed_validation_images_are_not_fitted_on(held_out_run, monkeypatch):
    changed = SMALL[0].take(np.arange(400)[::-1]), SMALL[1]
    monkeypatch.setattr(synthetic, "load", lambda: changed)
    record = evaluate_as_json(held_out_run, precision="float32")
    assert record["temperature_scaling"]["fitted_on"] == "the other half of the images"


@pytest.mark.parametrize(
    ("kind", "temperature"), [("saved_model", 0.25), ("keras", 0.0), ("litert", 0.25), ("onnx", 0.25)]
)
def test_exports_have_the_temperature_and_the_same_labels(held_out_run, tmp_path, capsys, kind, temperature):
    value, text = temperature, f"{temperature}, as given"
    if not temperature:  # auto
        (value,) = own_record(held_out_run)["temperature_scaling"]["temperatures"]
        text = f"{value:.4g}, fitted on 100 validation images"
    path, plain = tmp_path / export.FORMATS[kind].name, own_probabilities(held_out_run)
    assert export_with(held_out_run, num_gpus=2, format=kind, out=str(path), check=50, temperature=temperature)
    line = f"logits divided by the temperature {text}"
    assert f" MB, {line}\n" in capsys.readouterr().out
    card = path.parent / "README.md" if path.is_file() else path / "README.md"
    assert f"```python\n# {line}\n" in card.read_text()
    found, labels = export.FORMATS[kind].open(path)(SMALL[1].images), SMALL[1].labels
    np.testing.assert_allclose(found, scaled(plain, value), atol=1e-5)
    np.testing.assert_array_equal(found.argmax(1), plain.argmax(1))
    assert nll_and_ece(found, labels)[0] == pytest.approx(nll_and_ece(scaled(plain, value), labels)[0], abs=1e-5)


def test_quantized_export_has_the_temperature(held_out_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "NUM_CALIBRATION", 30)
    plain = own_probabilities(held_out_run)
    for quantize in ("float16", "int8"):
        out = tmp_path / f"{quantize}.tflite"
        assert export_with(held_out_run, format="litert", quantize=quantize, out=str(out), check=50, temperature=0.25)
        found = export.FORMATS["litert"].open(out)(SMALL[1].images)
        difference, without = (np.abs(found - each).max(1).mean() for each in (scaled(plain, 0.25), plain))
        assert difference < export.MEAN_ATOL[quantize] < without


def test_card_keeps_the_temperature_of_every_export(run, tmp_path, capsys):
    for name, temperature in (("one", 2.0), ("two", 1.0), ("three", 0.5)):
        assert export_with(run, format="keras", out=str(tmp_path / f"{name}.keras"), check=0, temperature=temperature)
    card = (tmp_path / "README.md").read_text()
    comments = dict(re.findall(r"`(\w+)\.keras`:\n\n```python\n(.*)\n", card))
    line = "# logits divided by the temperature {}, as given"
    assert comments == {"one": line.format(2), "two": "import keras", "three": line.format(0.5)}
    assert "temperature" in capsys.readouterr().out


def test_temperature_without_validation_images_is_said_to_be_fitted_on_test_images(
    run_without_validation, tmp_path, capsys
):
    assert export_with(run_without_validation, format="keras", out=str(tmp_path / "net.keras"), check=0, temperature=0)
    text = "fitted on 200 test images, as no validation images are at hand"
    assert text in capsys.readouterr().out and text in (tmp_path / "README.md").read_text()


def test_temperature_is_not_fitted_on_changed_test_images(run_without_validation, tmp_path, capsys, monkeypatch):
    """They may be images that the run was trained on. Those of a data set that the user names are another matter."""
    export_to = partial(
        export_with, run_without_validation, format="keras", out=str(tmp_path / "net.keras"), check=0, temperature=0
    )
    data = write_arrays(tmp_path, test=SMALL[1].take(slice(150)))
    assert export_to(dataset=data)
    text = "fitted on 150 test images of another data set, as no validation images are at hand"
    assert text in capsys.readouterr().out and text in (tmp_path / "README.md").read_text()
    moved = SMALL[0].take(slice(100, None)), SMALL[0].take(slice(100))
    monkeypatch.setattr(synthetic, "load", lambda: moved)
    for named in ("", "synthetic"):
        with pytest.raises(DataError, match="synthetic has other test images than in training; restore them, or give"):
            export_to(dataset=named)
    assert export_with(run_without_validation, format="keras", out=str(tmp_path / "net.keras"), temperature=2, check=50)


def test_temperature_that_cannot_be_fitted_is_refused(run, tmp_path, monkeypatch):
    export_to = partial(export_with, run, format="keras", out=str(tmp_path / "net.keras"), check=0, temperature=0)
    monkeypatch.setattr(export, "fit_temperature", lambda *_: None)
    with pytest.raises(
        UsageError, match=r"no temperature can be fitted on 200 test images: none .*; give a number, as --temp"
    ):
        export_to()
    monkeypatch.setattr(sources, "find", Mock(side_effect=DataError("no CIFAR-10 here")))
    with pytest.raises(DataError, match=r"is fitted on images, and no CIFAR-10 here; give it as a number, as --temp"):
        export_to()
    assert not (tmp_path / "net.keras").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", 0.0),
        ("1.5", 1.5),
        ("1", 1.0),
        ("0", None),
        ("0.0", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("x", None),
    ],
)
def test_temperature_on_the_command_line(text, value):
    argv = ["export.py", "--train_dir=runs/one", f"--temperature={text}"]
    if value is None:
        with pytest.raises(UsageError, match="temperature"):
            parse_command_line(ExportConfig, argv, "")
    else:
        assert parse_command_line(ExportConfig, argv, "").temperature == value


@pytest.mark.parametrize("classes", [2, 100])
def test_calibration_of_other_numbers_of_classes(tmp_path, classes):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 400), ("test", 200)):
        labels = rng.permutation(np.arange(count) % classes)
        levels = rng.integers(0, 40, (count, 20, 20, 3)) + (200 * labels / classes).astype(int)[:, None, None, None]
        arrays |= {f"x_{name}": levels.astype(np.uint8), f"y_{name}": labels}
    np.savez(tmp_path / "some.npz", **arrays)
    data, directory = f"npz:{tmp_path / 'some.npz'}", str(tmp_path / "run")
    result = train(CONFIG, dataset=data, train_dir=directory, validation_examples=50, image_size=20, crop=0, epochs=4)
    record = result["evaluations"][-1]
    labels = arrays["y_test"]
    probabilities = predicted_probabilities(directory, arrays["x_test"])
    assert (record["loss"], record["ece"]) == pytest.approx(nll_and_ece(probabilities, labels), abs=1e-6)
    assert record["split"] == "test" and len(record["temperature_scaling"]["temperatures"]) == 1


# Export -------------------------------------------------------------------------------------------------------------


SIZES = [(32, 32), (50, 70), (71, 40), (20, 24), (300, 301), (48, 64), (1, 7), (700, 1001), (33, 32)]


@pytest.mark.parametrize("image_size", [24, 32, 96])
def test_pictures_are_resized_as_by_pillow_to_rounding(image_size):
    """Pillow rounds to whole levels after each of two passes, and the data sets of folders are resized by Pillow."""
    random = np.random.default_rng(0)
    resize = tf.function(
        lambda images: predict.resize_square(images, image_size),
        input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8)],
    )
    for height, width in SIZES:
        levels = random.integers(0, 256, (height, width, 3), np.uint8)
        expected = image_files.to_levels(Image.fromarray(levels), image_size)
        found = resize(tf.constant(levels[None]))[0]
        np.testing.assert_allclose(found, expected, atol=1.01)
        if height == width == image_size:
            np.testing.assert_array_equal(found, levels)


@pytest.mark.parametrize("size", [(50, 70), (24, 33), (300, 301)])
def test_exports_and_predictions_of_a_picture_are_equal(run, tmp_path, capsys, size):
    levels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(levels).save(tmp_path / "picture.png")
    predict_with(run, tmp_path / "picture.png", precision="float32", json=True)
    predicted = json.loads(capsys.readouterr().out)["probabilities"]
    opened = load_run.open_run(run)
    model = export.to_stock_layers(opened.load("ema", "float32"))
    module = export.ServingModule(model, opened.augmentation, 32, opened.info.class_names)
    served = module.serve(image_files.read(tmp_path / "picture.png", 32)[None])
    of_class = dict(zip(opened.info.class_names, served["probabilities"][0].numpy(), strict=True))
    np.testing.assert_allclose([of_class[name] for name in predicted], list(predicted.values()), atol=2e-6)


ELSEWHERE = """
import sys
sys.modules["cifar_towers"] = None  # as if it were not installed
import numpy as np
images = np.load("images.npy")
"""
RUN_EXPORT = {
    "saved_model": "import tensorflow as tf\n"
    "serve = tf.saved_model.load(path).signatures['serving_default']\n"
    "answer = {name: tensor.numpy() for name, tensor in serve(images=tf.constant(images)).items()}",
    "keras": "import keras\nanswer = keras.models.load_model(path)(images)",
    "litert": "from ai_edge_litert.interpreter import Interpreter\n"
    "answer = Interpreter(path).get_signature_runner()(images=images)",
    "onnx": "import onnxruntime\n"
    "session = onnxruntime.InferenceSession(path)\n"
    "assert session.get_inputs()[0].shape == ['batch', 'height', 'width', 3]\n"
    "names = [output.name for output in session.get_outputs()]\n"
    "answer = dict(zip(names, session.run(names, {session.get_inputs()[0].name: images})))",
}
SAVE_ANSWER = (
    "np.savez({kind!r}, **{{n: np.array(v).astype(str if 'class' in n else float) for n, v in answer.items()}})"
)


@pytest.mark.parametrize("kinds", [("saved_model", "keras"), ("litert",), ("onnx",)], ids="-".join)
def test_exports_run_without_this_package(run, tmp_path, capsys, kinds):
    program = ELSEWHERE
    for kind in kinds:
        path = tmp_path / export.FORMATS[kind].name
        assert export_with(run, num_gpus=1, format=kind, out=str(path), check=200)
        out = capsys.readouterr().out
        assert "checked on 200 test images" in out and "ema weights" in out
        program += f"path = {str(path)!r}\n{RUN_EXPORT[kind]}\n{SAVE_ANSWER.format(kind=kind)}\n"
    np.save(tmp_path / "images.npy", np.pad(SMALL[1].images[:6], [(0, 0), (0, 0), (4, 4), (0, 0)]))
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=tmp_path)
    expected = expected_probabilities(run, 6)
    for kind in kinds:
        answer = np.load(tmp_path / f"{kind}.npz")
        np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)
        assert answer["class_name"].tolist() == [synthetic.CLASSES[index] for index in expected.argmax(1)]
        assert kind == "keras" or answer["class_names"].tolist() == list(synthetic.CLASSES)


@pytest.mark.parametrize(
    ("kind", "out", "message"),
    [
        ("saved_model", "{}/photos", "exists and is no saved_model"),
        ("keras", "{}/net", "does not end in .keras; write --out=.*net.keras"),
        *(
            ("saved_model", out, rf"--out={out} may hold other files; write --out=.*saved_model")
            for out in (".", "..", "/")
        ),
        ("onnx", ".", "does not end in .onnx; write --out=model.onnx"),
    ],
)
def test_only_earlier_exports_are_replaced(run, tmp_path, kind, out, message):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"")
    with pytest.raises(UsageError, match=message):
        export_with(run, format=kind, out=out.format(tmp_path))


def test_export_that_holds_other_files_is_not_replaced(run, earlier):
    (earlier / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"net also holds notes.txt, which would be lost; move it, or give another"):
        export_with(run, out=str(earlier), check=0)
    assert (earlier / "notes.txt").exists()


def test_export_is_checked_on_classes_in_another_order(run, tmp_path, capsys):
    split = SMALL[1].take(slice(100))
    names = split.info._replace(class_names=tuple(f"my {name}" for name in synthetic.CLASSES))
    data = write_arrays(tmp_path / "set", test=split)
    others = write_arrays(tmp_path / "others", test=replace(split, info=names))
    export_to = partial(export_with, run, format="keras", out=str(tmp_path / "net.keras"), check=100)
    assert export_to(dataset=data)
    accuracy = 100 * (expected_probabilities(run, 100).argmax(1) == split.labels).mean()
    assert f"100 test images: accuracy {accuracy:.2f} %, the checkpoint's {accuracy:.2f} %" in capsys.readouterr().out
    with pytest.raises(DataError, match="was trained on striped disc, .*others/arrays.npz now has my striped disc, "):
        export_to(dataset=others)


def test_training_images_are_not_read_to_use_the_test_images(run, tmp_path, monkeypatch):
    accuracy = own_record(run)["accuracy"]
    monkeypatch.setattr(sources, "load", Mock(side_effect=AssertionError("training images are read")))
    assert evaluate_as_json(run, precision="float32")["accuracy"] == accuracy
    assert export_with(run, out=str(tmp_path / "net"), check=50)


def set_format(monkeypatch, **functions):
    """Write or open saved models by other functions."""
    monkeypatch.setitem(export.FORMATS, "saved_model", export.FORMATS["saved_model"]._replace(**functions))


@pytest.fixture
def earlier(tmp_path):
    """Make a directory that counts as an earlier export."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "saved_model.pb").write_text("earlier")
    return tmp_path / "net"


def test_failed_check_keeps_the_earlier_export_and_the_failed_one(run, earlier, capsys, monkeypatch):
    def write(module, path):
        path.mkdir()
        (path / "saved_model.pb").write_text("new")

    def export_opened_by(function):
        set_format(monkeypatch, write=write, open=function)
        return export_with(run, out=str(earlier), check=50)

    def uniform(path):
        return lambda images: np.full((len(images), 10), 0.1)

    cases = ((uniform, "differs by more than the 1e-04"), (Mock(side_effect=ValueError("none")), "cannot be run"))
    for number, (function, problem) in enumerate(cases, 1):
        assert not export_opened_by(function)
        failed = earlier.with_name(f"failed-{number}-net")
        message = f"{failed} {problem}.*: do not use it; {earlier} is the earlier export"
        assert re.search(message, capsys.readouterr().err)
        assert (failed / "saved_model.pb").read_text() == "new"
        assert (earlier / "saved_model.pb").read_text() == "earlier"
    monkeypatch.setattr(export, "PROBABILITY_ATOL", 1.0)
    assert export_opened_by(uniform) and (earlier / "saved_model.pb").read_text() == "new"
    assert {path.name for path in earlier.parent.iterdir()} == {"net", "failed-1-net", "failed-2-net"}


def test_check_notices_another_resizing(run, tmp_path, capsys, monkeypatch):
    kind = export.FORMATS["saved_model"]

    def open_with_another_resizing(path):
        serve = kind.open(path)
        return lambda images: serve(tf.cast(tf.image.resize(images, [32, 32], antialias=True), tf.uint8))

    set_format(monkeypatch, open=open_with_another_resizing)
    assert not export_with(run, out=str(tmp_path / "net"), check=50)
    out, err = capsys.readouterr()
    same_size, other_sizes = map(float, re.search(r"probability (\S+), in other sizes (\S+)", out).groups())
    assert same_size < 1e-5 and other_sizes > export.PROBABILITY_ATOL
    assert "differs by more than the 1e-04" in err


@pytest.mark.parametrize(
    ("error", "message", "shown"),
    [
        (KeyError("no operation"), r"to format=saved_model \(KeyError: 'no operation'\).*--format", "Traceback"),
        (tf.errors.ResourceExhaustedError(None, None, "No space"), r"net cannot be written \(No space\); .*--out", ""),
    ],
)
def test_failed_conversion_is_named_and_shows_its_traceback(run, tmp_path, capsys, monkeypatch, error, message, shown):
    set_format(monkeypatch, write=Mock(side_effect=error))
    with pytest.raises(RunError, match=message):
        export_with(run, out=str(tmp_path / "net"), check=0)
    assert capsys.readouterr().err.partition(" ")[0] == shown


def test_older_checkpoint_is_chosen_by_its_step(run, tmp_path):
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run)]
    assert len(steps) > 1 and load_run.open_run(run).metadata["step"] == steps[-1]
    assert evaluate_as_json(run, step=steps[0])["step"] == steps[0]
    listed = ", ".join(map(str, steps))
    with pytest.raises(UsageError, match=f"has no checkpoint of step 999; those it has are of: {listed}$"):
        load_run.open_run(run, step=999)
    copy = shutil.copytree(run, tmp_path / "copy")
    (checkpoint_path(copy, steps[0]) / "metadata.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged .*; give another --step$"):
        load_run.open_run(copy, step=steps[0])


def test_run_without_a_result_is_said_to_be_unfinished(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "stopped")
    (tmp_path / "stopped/result.json").unlink()
    with caplog.at_level("INFO"):
        load_run.open_run(run, step=5)
        load_run.open_run(tmp_path / "stopped", step=5)
        for result in ('{"step": 4}', "{"):  # continued after --max_steps=4; damaged
            (tmp_path / "stopped/result.json").write_text(result)
            load_run.open_run(tmp_path / "stopped", step=5)
    assert caplog.messages == 3 * [f"{tmp_path / 'stopped'} is not finished: step 5 of 8"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}  # shown where no logging is set up


def test_export_without_data_can_skip_the_check(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "find", Mock(side_effect=DataError("no CIFAR-10 here")))
    with pytest.raises(DataError, match="^the export is checked on test images, and no CIFAR-10 here; --check=0 skips"):
        export_with(run, out=str(tmp_path / "net"))
    assert export_with(run, out=str(tmp_path / "net"), check=0) and "not checked" in capsys.readouterr().out


def test_model_card_lists_exports_of_one_checkpoint_and_says_what_was_not_evaluated(run, tmp_path):
    step, *_, last = (int(path.name.removeprefix("step-")) for path in list_checkpoints(run))

    def card_after(name, **settings):
        assert export_with(run, format="keras", out=str(tmp_path / name), check=0, **settings)
        card = (tmp_path / "README.md").read_text()
        return card, re.findall(r"load_model\(\'(.*)\'\)", card)

    card, listed = card_after("early.keras", step=step)
    assert f"\n\nStep {step} was not evaluated on the test images.\n" in card and "    metrics: []\n" in card
    assert listed == ["early.keras"] and f"the ema weights of step {step}, checkpoint " in card
    (accuracy,) = (
        score["accuracy"]
        for score in json.loads((run / "result.json").read_text())["evaluations"]
        if (score["weights"], score["tta"]) == ("ema", 0)
    )
    card, listed = card_after("one.keras")
    assert f'    metrics: [{{"type": "accuracy", "value": {accuracy}}}]\n' in card and "was not evaluated" not in card
    assert listed == ["one.keras"] and f"the ema weights of step {last}, checkpoint " in card
    assert card_after("two.keras")[1] == ["one.keras", "two.keras"]
    (tmp_path / "one.keras").unlink()
    assert card_after("two.keras")[1] == ["two.keras"]
    assert card_after("raw.keras", weights="raw")[1] == ["raw.keras"]


def test_model_card_replaces_only_unchanged_cards(run, tmp_path, capsys):
    def export_to(name, kind="keras"):
        assert export_with(run, format=kind, out=str(tmp_path / name), check=0)
        return capsys.readouterr()

    card = tmp_path / "README.md"
    card.write_text("# My nets\n")
    assert f"{card} is kept: it is no model card, or was edited; " in export_to("net.keras").out
    assert card.read_text() == "# My nets\n"
    card.unlink()
    export_to("net.keras")
    card.write_text(edited := card.read_text().replace("---\n", "---\nlicense: mit\n", 1))
    assert "is kept" in export_to("net.keras").out and card.read_text() == edited

    inside = tmp_path / "net" / "README.md"  # a saved model at a place of its own holds its card
    assert f"{inside}: the model card" in export_to("net", "saved_model").out
    assert "tf.saved_model.load('.')" in inside.read_text()
    inside.write_text("# My net\n")
    assert f"{inside} is kept" in export_to("net", "saved_model").out and inside.read_text() == "# My net\n"
    assert card.read_text() == edited

    damaged = copy_of(run, tmp_path / "damaged")
    (damaged / "result.json").write_text("{")
    assert export_with(damaged, format="keras", check=0)
    assert "there is no new model card: " in capsys.readouterr().err


def test_missing_package_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(UsageError, match=r"format=onnx needs tf2onnx, which is not installed; to install .*\[export\]"):
        export_with(run, format="onnx")


# The user's own model and data --------------------------------------------------------------------------------------

NETS = """
import keras
import tensorflow as tf
from keras import layers

class Shift(layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(name="shift", shape=shape[-1:])

    def call(self, x):
        return x + self.shift

def net(num_classes):
    images = keras.Input((32, 32, 3))
    x = layers.Conv2D(8, 3, 2)(images)
    x = Shift()(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.Dropout(0.2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(num_classes, kernel_regularizer=keras.regularizers.L2(1e-3))(x))

def sequential():
    body = keras.Sequential([layers.Input((32, 32, 3)), layers.Conv2D(4, 3, 4, activation="relu"), layers.Flatten()])
    return keras.Sequential([body, layers.Dense(10, kernel_constraint="non_neg")])

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.head = keras.layers.Flatten(), keras.layers.Dense(10)

    def call(self, x):
        return self.head(self.flat(x))
"""


@pytest.fixture
def own(tmp_path):
    """own(name): the configuration of a run with a net of the user's own."""
    (tmp_path / "nets.py").write_text(NETS)
    settings = {"crop": 0, "ema_decay": 0.0, "train_dir": str(tmp_path / "own")}
    return lambda name="net": replace(CONFIG, model=f"{tmp_path / 'nets.py'}:{name}", **settings)


def test_own_model_is_trained_resumed_and_used(own, tmp_path, folder, capsys):
    result = train(own())
    resumed = replace(own(), train_dir=str(tmp_path / "resumed"))
    train(resumed, max_steps=3)
    assert train(resumed)["weights_sha256"] == result["weights_sha256"]  # dropout's numbers follow from the step
    records = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["accuracy"] == result["evaluations"][-1]["accuracy"]
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "nets.py").rename(tmp_path / "elsewhere" / "nets.py")
    model, directory = f"{moved}:net", tmp_path / "own"
    score = evaluate_as_json(directory, model=model, precision="float32")
    assert score["accuracy"] == result["evaluations"][-1]["accuracy"]
    predict_with(directory, folder / "0.png", model=model)
    assert export_with(directory, model=model, format="keras", out=str(tmp_path / "net.keras"), check=100)


def test_own_model_is_executed_only_if_the_user_names_it(run, tmp_path):
    evil = f"{tmp_path / 'evil.py'}:net"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    copy = copy_of(run, tmp_path / "sent", model=evil)
    message = f"trained with --model={evil}, code that must be executed .* give --model={evil}"
    for use in (partial(evaluate_as_json, copy), partial(predict_with, copy, "a.png"), partial(export_with, copy)):
        for model in ({}, {"model": "cifarnet"}):
            with pytest.raises(UsageError, match=message):
                use(**model)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UsageError, match="has no function net"):
        predict_with(copy, "a.png", model=evil)
    assert (tmp_path / "executed").exists()


def test_built_in_model_cannot_be_replaced(run):
    assert load_run.open_run(run).config == load_run.open_run(run, "cifarnet").config
    for other in ("resnet20", "nets.py:net"):
        with pytest.raises(UsageError, match=f"trained with --model=cifarnet, not {other}; leave --model out"):
            load_run.open_run(run, other)


def test_other_model_than_was_trained_is_refused(run, tmp_path, own):
    copy = copy_of(run, tmp_path / "sent", model="old/nets.py:net", crop=0)
    with pytest.raises(UsageError, match="has no variable .*; it is of another model"):
        load_run.open_run(copy, own("sequential").model).load("raw", "float32")


@pytest.mark.parametrize(
    ("precision", "strategy"), [("bfloat16", "mirrored"), pytest.param("float16", "towers", marks=pytest.mark.slow)]
)
def test_sequential_model_with_a_constraint_in_half_precision(own, precision, strategy):
    config = own("sequential")
    result = train(config, precision=precision, strategy=strategy, max_steps=4)
    assert np.isfinite(result["evaluations"][-1]["loss"])
    values = read_variables(latest_checkpoint(config.directory))
    (head,) = (value for name, value in values.items() if name.startswith("model.") and value.ndim == 2)
    assert head.shape[1] == 10 and head.min() == 0 < head.max()


def test_subclassed_model_without_get_config_is_explained(own, tmp_path, capsys):
    config = own("Subclassed")
    train(config, max_steps=1)
    export = partial(export_with, config.train_dir, model=config.model, check=50)
    assert not export(format="keras", out=str(tmp_path / "net.keras"))
    assert "needs get_config and **kwargs in layers of your own; saved_model does not" in capsys.readouterr().err
    assert export(out=str(tmp_path / "net")) and export(out=str(tmp_path / "net"), temperature=2.0)


def test_own_folder_is_trained_on_evaluated_and_predicted(tmp_path, folder, capsys):
    splits = {"train": SMALL[0].take(slice(150)), "test": SMALL[1].take(slice(150))}
    data = write_folder(tmp_path / "set", **splits)
    config = replace(CONFIG, dataset=data, batch_size=50, train_dir=str(tmp_path / "mine"))
    result = train(config)
    opened = load_run.open_run(tmp_path / "mine")
    assert opened.info.class_names == tuple(sorted(synthetic.CLASSES))
    accuracy = result["evaluations"][-1]["accuracy"]
    assert evaluate_as_json(config.train_dir, precision="float32")["accuracy"] == accuracy
    predict_with(config.train_dir, folder / "0.png")
    answer = capsys.readouterr().out.splitlines()[-1].removeprefix(str(folder / "0.png"))
    assert any(name in answer for name in opened.info.class_names)
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = evaluate_as_json(config.train_dir, dataset=f"folder:{tmp_path / 'moved'}", precision="float32")
    assert moved["accuracy"] == accuracy
    (tmp_path / "moved").rename(tmp_path / "set")
    next((tmp_path / "set" / "test").glob("*/*.png")).unlink()
    with pytest.raises(DataError, match="made with other test images than"):
        train(config)
    evaluation = EvaluateConfig(train_dir=config.train_dir, precision="float32")
    changed = "made with other test images than .* give --allow_changed_data to evaluate on these"
    for named in ("", data):  # as the last lines of the training name it
        with pytest.raises(DataError, match=changed):
            evaluate_checkpoint(replace(evaluation, dataset=named))
    assert evaluate_as_json(config.train_dir, dataset=data, allow_changed_data=True)["count"] == 149
    output = evaluate_checkpoint(replace(evaluation, allow_changed_data=True))
    assert "test (another set than in training: 0 of 149 images were trained on), ema weights" in output
    assert "of 149;" in output
    next((tmp_path / "set" / "train").glob("*/*.png")).unlink()
    with pytest.raises(DataError, match="made with other train and test images than"):
        train(config)
    (tmp_path / "set" / "test" / opened.info.class_names[0]).rename(tmp_path / "set" / "test" / "other")
    with pytest.raises(DataError, match="test has the classes other, and train only"):
        evaluate_checkpoint(EvaluateConfig(train_dir=config.train_dir))


# Another test set -----------------------------------------------------------------------------------------------------


def test_tfds_set_with_a_test_alone_and_its_classes_in_another_order_is_scored(run, tmp_path):
    import tensorflow_datasets as tfds

    names = ["chequered ring", "striped disc", "chequered disc"]
    labels = np.array([names.index(synthetic.CLASSES[label]) if synthetic.CLASSES[label] in names else -1
                       for label in SMALL[1].labels])  # fmt: skip
    pixels, labels = SMALL[1].images[labels >= 0], labels[labels >= 0]
    features = {"image": tfds.features.Image(shape=(32, 32, 3)), "label": tfds.features.ClassLabel(names=names)}
    tfds.dataset_builders.store_as_tfds_dataset(
        "shapes",
        "1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={"test": tf.data.Dataset.from_tensor_slices({"image": pixels, "label": labels})},
        data_dir=tmp_path,
    )
    score = evaluate_as_json(run, dataset="shapes", data_dir=str(tmp_path), precision="float32")
    own = np.array(own_record(run)["confusion"])
    expected = np.zeros_like(own)
    for name in names:
        expected[synthetic.CLASSES.index(name)] = own[synthetic.CLASSES.index(name)]
    np.testing.assert_array_equal(score["confusion"], expected)
    assert score["count"] == len(labels) == 60
    assert (score["dataset"], score["split"], score["changed_data"]) == ("shapes", "test", True)
    evaluation = EvaluateConfig(train_dir=str(run), dataset="shapes", data_dir=str(tmp_path), precision="float32")
    title, *_, cross, _ = evaluate_checkpoint(evaluation).splitlines()
    assert ": shapes test (another set than in training: 0 of 60 images were trained on), ema" in title
    assert score["per_class"]["chequered cross"] is None and cross.split() == ["chequered", "cross", "-", "0", "-"]
    with pytest.raises(UsageError, match="shapes has no train examples"):
        evaluate_checkpoint(replace(evaluation, split="train"))


def test_folder_is_scored_if_it_has_a_test_and_classes_of_the_run(run, tmp_path):
    data = write_folder(tmp_path / "set", test=SMALL[1].take(slice(80)))
    score = evaluate_as_json(run, dataset=data, precision="float32")
    assert score["count"] == 80
    correct = expected_probabilities(run, 80).argmax(1) == SMALL[1].labels[:80]
    assert score["correct"] == correct.sum()
    with pytest.raises(DataError, match=r"has no test split and is not the data of .*; give it a test split, or"):
        evaluate_as_json(run, dataset=f"{data}/test", precision="float32")
    (tmp_path / "set/test/chequered disc").rename(tmp_path / "aside")
    (tmp_path / "set/test/chequered disc").mkdir()  # a class may be missing, and so may its images
    without = evaluate_as_json(run, dataset=data, precision="float32")
    is_left = SMALL[1].labels[:80] != synthetic.CLASSES.index("chequered disc")
    assert (without["count"], without["correct"]) == (is_left.sum(), correct[is_left].sum())
    (tmp_path / "set/test/chequered disc").rmdir()
    (tmp_path / "aside").rename(tmp_path / "set/test/disc")
    with pytest.raises(
        DataError, match=r"was trained on striped disc, .* and 5 more, and folder:.*/set now has disc; restore the data"
    ):
        evaluate_as_json(run, dataset=data)


def test_table_is_trained_on_and_evaluated_as_arrays(tmp_path):
    train_split, test_split = (split.take(split.labels < 3) for split in SMALL)
    train_split, test_split = train_split.take(slice(60)), test_split.take(slice(30))
    names = [synthetic.CLASSES[label] for label in range(3)]
    rows = ["file,label,split"]
    for name, split in (("train", train_split), ("test", test_split)):
        for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
            Image.fromarray(image).save(tmp_path / f"{name}-{index}.png")
            rows.append(f"{name}-{index}.png,{names[label]},{name}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    data = f"csv:{tmp_path / 'labels.csv'}"
    config = replace(CONFIG, dataset=data, batch_size=20, epochs=1, train_dir=str(tmp_path / "run"))
    result = train(config)
    trained = load_run.open_run(tmp_path / "run")
    assert trained.info.class_names == tuple(sorted(names)) and trained.metadata["dataset"] == data
    assert (tmp_path / "run/mistakes.png").exists()
    own = evaluate_as_json(config.train_dir, precision="float32")
    assert own["accuracy"] == result["evaluations"][-1]["accuracy"] and own["count"] == 30
    (tmp_path / "labels.csv").rename(tmp_path / "moved.csv")
    assert train(config, dataset=f"csv:{tmp_path / 'moved.csv'}")["step"] == result["step"] == 3
    data = write_arrays(
        tmp_path / "arrays", test=replace(test_split, info=test_split.info._replace(class_names=tuple(names)))
    )
    arrays = evaluate_as_json(config.train_dir, dataset=data, precision="float32")
    assert (arrays["confusion"], arrays["count"]) == (own["confusion"], 30)
    (tmp_path / "others.csv").write_text("\n".join(row.rpartition(",")[0] for row in rows))
    with pytest.raises(DataError, match="others.csv has no test split and is not the data of"):
        evaluate_as_json(config.train_dir, dataset=f"csv:{tmp_path}/others.csv")
    (tmp_path / "others.csv").write_text("\n".join([rows[0], *rows[1:6], *rows[-3:]]).replace(",train", ",test"))
    evaluation = EvaluateConfig(
        train_dir=config.train_dir, dataset=f"csv:{tmp_path / 'others.csv'}", precision="float32"
    )
    assert "others.csv test (another set than in training), ema weights" in evaluate_checkpoint(
        evaluation
    )  # labels.csv is gone
    (tmp_path / "moved.csv").rename(tmp_path / "labels.csv")
    title = "(another set than in training: 5 of 8 images were trained on), ema weights"
    assert title in evaluate_checkpoint(evaluation)
    score = evaluate_as_json(config.train_dir, dataset=evaluation.dataset, precision="float32")
    assert (score["changed_data"], score["copies_of_training_images"], score["count"]) == (True, 5, 8)
    rows[1] = rows[1].replace(names[int(train_split.labels[0])], names[int(train_split.labels[0]) - 1])
    (tmp_path / "labels.csv").write_text("\n".join(rows))  # its training data are not the run's any more
    assert "others.csv test (another set than in training), ema weights" in evaluate_checkpoint(evaluation)
