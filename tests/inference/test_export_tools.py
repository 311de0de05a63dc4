"""Exports in the hands of the standard tools of their formats: converted, quantized, served, trained on."""

import contextlib
import dataclasses
import functools
import io
import json
import re
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver
from ai_edge_litert.interpreter import Interpreter
from onnxruntime.quantization import QuantType, quantize_dynamic
from PIL import ExifTags, Image
from tensorflow.python.tools import saved_model_cli

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EXPORT_FORMATS, ExportConfig, PredictConfig
from cifar_towers.data import sources, synthetic
from cifar_towers.errors import DataError, UsageError
from cifar_towers.inference import export
from cifar_towers.inference.export import export_model
from cifar_towers.inference.predict import predict_images
from tests.runs import short_runs

SMALL = synthetic.make(400, 0, 0), synthetic.make(200, 0, 1)
IMAGES = SMALL[1].images[:7]
ATOL = {"": 1e-5, "float16": 5e-3, "int8": 0.1}  # of a probability, by number format
WEIGHT_BYTES = {"": 4, "float16": 2, "int8": 1}
CONFIG = TrainConfig(
    num_gpus=1, dataset="synthetic", model="speednet_proxy", batch_size=50, epochs=4, precision="float32",
    learning_rate=0.1, summary_every_steps=0, eval_every_epochs=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run with the layers of the speed recipes and return its directory."""
    directory = tmp_path_factory.mktemp("tools") / "run"
    with short_runs.small_runs(*SMALL) as patch:
        patch.setattr(export, "OTHER_SIZES", ((0.75, 1.0), (1.5, 2.0)))
        patch.setattr(export, "NUM_CALIBRATION", 30)
        short_runs.run(CONFIG, directory)
        yield directory


@pytest.mark.parametrize(("image_size", "expected"), [(32, 20), (64, 5), (224, 2)])
def test_fewer_large_images_are_checked_in_other_sizes(monkeypatch, image_size, expected):
    monkeypatch.setattr(export, "OTHER_SIZES", ((0.75, 1.0), (1.5, 2.0)))
    images = np.zeros((30, image_size, image_size, 3), np.uint8)
    samples = export._make_samples(images, image_size, lambda inputs: np.zeros([len(inputs), 10]))
    assert [len(images) for images, _ in samples] == [30, expected, expected]
    assert [len(probabilities) for _, probabilities in samples] == [30, expected, expected]


@pytest.fixture(scope="module")
def exported(run):
    """exported(format, quantize): the path of an export and what the program printed."""

    @functools.cache
    def exported(kind, quantize=""):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert export_model(ExportConfig(train_dir=str(run), format=kind, quantize=quantize, check=200, num_gpus=1))
        return Path(re.search(r"^(\S+): ", out.getvalue(), re.M)[1]), out.getvalue()

    return exported


@pytest.fixture(scope="module")
def predicted(run, tmp_path_factory):
    """predicted(height, width): the images in this size, and what `predict.py` prints for their files."""
    folder = tmp_path_factory.mktemp("pictures")

    @functools.cache
    def predicted(height=32, width=32):
        images = [Image.fromarray(image).resize((width, height)) for image in IMAGES]
        paths = [folder / f"{height}-{width}-{index}.png" for index in range(len(images))]
        for image, path in zip(images, paths, strict=True):
            image.save(path)
        config = PredictConfig(train_dir=str(run), pictures=tuple(map(str, paths)), precision="float32", json=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            predict_images(config)
        return np.stack(images), [json.loads(line) for line in out.getvalue().splitlines()]

    return predicted


def check(answers, outputs, atol=ATOL[""]):
    """Compare outputs, by name, with the first of the answers of `predict.py`: the three highest probabilities."""
    probabilities = np.asarray(outputs["probabilities"])
    assert probabilities.shape[1] == 10 and len(probabilities)
    for of_image, answer in zip(probabilities, answers[: len(probabilities)], strict=True):
        by_name = dict(zip(synthetic.CLASSES, of_image, strict=True))
        found = [by_name[name] for name in answer["probabilities"]]
        np.testing.assert_allclose(found, list(answer["probabilities"].values()), rtol=0, atol=atol)
    if atol == ATOL[""] and "class_name" in outputs:
        names = [name.decode() if isinstance(name, bytes) else name for name in np.asarray(outputs["class_name"])]
        assert names == [answer["class"] for answer in answers[: len(names)]]


def documented(part):
    """Return the example of docs/inference.md that contains `part`, compiled."""
    page = Path(export.__file__).parents[2] / "docs/inference.md"
    (example,) = (each for each in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if part in each)
    return compile(example, page.name, "exec")


def open_litert(content):
    return Interpreter(model_content=content).get_signature_runner("serving_default")


# The model card -------------------------------------------------------------------------------------------------------


def test_card_has_the_results_of_the_run_and_examples_that_compute_its_probabilities(
    run, exported, monkeypatch, capsys
):
    for kind in ("saved_model", "keras", "tflite", "onnx"):
        assert f"{run}/export/README.md: the model card" in exported(kind)[1]
    _, metadata, text = (run / "export/README.md").read_text().split("---\n", 2)
    scores = json.loads((run / "result.json").read_text())["evaluations"]
    (plain,) = (score for score in scores if score["tta"] == 0)
    assert metadata == (
        "library_name: keras\npipeline_tag: image-classification\ndatasets: []\nmetrics: [accuracy]\n"
        'model-index:\n- name: "run"\n  results:\n  - task: {type: image-classification}\n'
        '    dataset: {type: "synthetic", name: "synthetic", split: test}\n'
        f'    metrics: [{{"type": "accuracy", "value": {plain["accuracy"]}}}]\n'
    )
    for score in scores:  # the ends of Wilson's interval are the roots of (accuracy - p)^2 = z^2 p (1 - p) / n
        accuracy, z2_n = score["accuracy"], 1.959964**2 / score["count"]
        low, high = 100 * np.sort(np.roots([1 + z2_n, -2 * accuracy - z2_n, accuracy**2]))
        kind = f"({score['weights']} weights, TTA {score['tta']}, 200 images)"
        assert f"- test {100 * accuracy:.2f} % {kind}, 95 % interval {low:.2f} to {high:.2f} %\n" in text
    environment = json.loads((run / "environment.json").read_text())
    version = f"cifar_towers {environment['packages']['cifar-towers']}, revision {environment['git_revision']}"
    shown = " ".join(text.split())
    assert version in shown and ", ".join(synthetic.CLASSES) in shown and "SYNTHETIC DATA" in shown

    monkeypatch.chdir(run / "export")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    picture = Image.fromarray(IMAGES[0]).resize((48, 64))
    picture.putalpha(picture.convert("L"))
    picture.save("picture.jpg", "PNG", exif=exif)
    predict_images(PredictConfig(train_dir=str(run), pictures=("picture.jpg",), precision="float32", json=True))
    answer = json.loads(capsys.readouterr().out)
    (read,) = re.findall(r"\n\n```python\n(import numpy.*?)```", text, re.S)
    examples = dict(re.findall(r"`(\S+)`:\n\n```python\n(.*?)```", text, re.S))
    assert {"saved_model", "model.keras", "model.tflite", "model.onnx"} <= examples.keys()
    for name, example in examples.items():
        names = {}
        exec(compile(read + example, "README.md", "exec"), names)
        check([answer], names, next((ATOL[kind] for kind in ("int8", "float16") if kind in name), ATOL[""]))


# LiteRT ---------------------------------------------------------------------------------------------------------------


CONVERTERS = {
    "saved_model": lambda path: tf.lite.TFLiteConverter.from_saved_model(str(path)),
    "keras": lambda path: tf.lite.TFLiteConverter.from_keras_model(keras.models.load_model(path)),
}


@pytest.mark.parametrize(
    ("kind", "quantize"), [("saved_model", ""), ("saved_model", "int8"), ("keras", ""), ("keras", "float16")]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensorflow_converts_and_quantizes(exported, predicted, kind, quantize):
    path, _ = exported(kind)
    converter = CONVERTERS[kind](path)
    if quantize:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if quantize == "int8":
        converter.representative_dataset = lambda: ([image[None]] for image in SMALL[0].images[:30])
    content = converter.convert()
    num_weights = keras.models.load_model(exported("keras")[0]).count_params()
    assert 0 < len(content) - WEIGHT_BYTES[quantize] * num_weights < 60_000
    images, answers = predicted()
    check(answers, open_litert(content)(images=images), ATOL[quantize])


@pytest.mark.parametrize("quantize", ATOL)
def test_litert_exports_of_each_number_format(exported, predicted, quantize):
    path, printed = exported("tflite", quantize)
    assert path.name == f"model-{quantize}.tflite".replace("-.", ".")
    accuracy, expected, megabytes = re.search(
        r"checked on 200 test images: accuracy (\S+) %, the checkpoint's (\S+) %.* (\S+) MB", printed, re.S
    ).groups()
    assert abs(float(accuracy) - float(expected)) <= 200 * ATOL[quantize] and float(expected) > 25
    assert float(megabytes) == pytest.approx(path.stat().st_size / 1e6, abs=0.01)
    run_ = open_litert(path.read_bytes())
    assert run_.get_input_details()["images"]["dtype"] == np.uint8
    assert run_.get_output_details()["probabilities"]["dtype"] == np.float32
    answer = run_(images=SMALL[1].images)["probabilities"]
    assert 100 * (answer.argmax(1) == SMALL[1].labels).mean() == pytest.approx(float(accuracy), abs=0.01)
    for size in ((32, 32), (48, 64), (100, 81)):  # int8 reads all sizes too
        images, answers = predicted(*size)
        check(answers, run_(images=images), ATOL[quantize])


def test_int8_computes_the_net_in_integers_and_the_preprocessing_in_floats(exported):
    path, _ = exported("tflite", "int8")
    interpreter = Interpreter(str(path))
    tensors = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    by_operation = {}
    for operation in interpreter._get_ops_details():
        dtypes = {tensors[index]["dtype"] for index in operation["outputs"] if index in tensors}
        by_operation.setdefault(operation["op_name"], set()).update(dtypes)
    assert not [name for name in by_operation if name.startswith("Flex")]
    for name in ("CONV_2D", "MAX_POOL_2D", "GELU", "FULLY_CONNECTED", "SOFTMAX"):
        assert by_operation[name] == {np.int8}
    assert by_operation["BATCH_MATMUL"] == by_operation["CUMSUM"] == {np.float32}


def test_litert_file_is_run_as_documented(exported, predicted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(exported("tflite")[0], "model.tflite")
    images, answers = predicted()
    Image.fromarray(images[0]).save("picture.jpg", "png")  # to the bit
    exec(documented("Interpreter("), {})
    name, probability = capsys.readouterr().out.rsplit(maxsplit=1)
    assert name == answers[0]["class"]
    assert float(probability) == pytest.approx(answers[0]["probabilities"][name], abs=ATOL[""])


def test_litert_interpreters_take_any_batch_and_only_levels(exported, predicted):
    path, _ = exported("tflite")
    images, answers = predicted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own interpreter is deprecated, and still used
        interpreters = tf.lite.Interpreter(str(path)), Interpreter(str(path), num_threads=2)
    for interpreter in interpreters:
        (entry,) = interpreter.get_input_details()
        for count in (1, 7):
            interpreter.resize_tensor_input(entry["index"], (count, 32, 32, 3))
            interpreter.allocate_tensors()
            interpreter.set_tensor(entry["index"], images[:count])
            interpreter.invoke()
            outputs = [interpreter.get_tensor(output["index"]) for output in interpreter.get_output_details()]
            (probabilities,) = (output for output in outputs if output.dtype == np.float32)
            assert len(probabilities) == count
            check(answers, {"probabilities": probabilities})
        with pytest.raises(ValueError, match="FLOAT32 but expected type UINT8"):
            interpreter.set_tensor(entry["index"], np.float32(images))


def test_quantizing_is_refused_for_other_formats_and_without_training_images(run, tmp_path, capsys, monkeypatch):
    for kind in ("saved_model", "keras", "onnx"):
        with pytest.raises(
            UsageError, match=f"format={kind} cannot be quantized; write --format=litert --quantize=int8"
        ):
            ExportConfig(train_dir=str(run), format=kind, quantize="int8")
    with pytest.raises(UsageError, match="quantize=int4 is not one of"):
        ExportConfig(train_dir=str(run), format="litert", quantize="int4")
    monkeypatch.setattr(sources, "find", Mock(side_effect=DataError("no CIFAR-10 here")))
    config = ExportConfig(train_dir=str(run), format="litert", quantize="int8", check=0)
    with pytest.raises(
        DataError, match="^int8 is calibrated on training images, and no CIFAR-10 here; --quantize=float16"
    ):
        export_model(config)
    config = dataclasses.replace(config, quantize="float16", out=str(tmp_path / "net.tflite"))
    assert export_model(config) and "not checked" in capsys.readouterr().out


def test_int8_that_reads_wrongly_is_kept_apart(run, tmp_path, capfd, monkeypatch):
    """Calibration on black images gives a file that converts, runs, and knows nothing."""
    write = export.FORMATS["litert"].write
    broken = export.FORMATS["litert"]._replace(
        write=lambda module, path, quantize, examples: write(module, path, quantize, np.zeros_like(examples))
    )
    monkeypatch.setitem(export.FORMATS, "litert", broken)
    out = tmp_path / "net.tflite"
    assert not export_model(ExportConfig(train_dir=str(run), format="litert", quantize="int8", check=50, out=str(out)))
    error = capfd.readouterr().err
    assert "failed-1-net.tflite loses more than the 5 percentage points of accuracy that int8 explains" in error
    assert "fully_quantize" not in error and not out.exists()


def test_formats_have_one_list():
    assert tuple(export.FORMATS) == EXPORT_FORMATS


# SavedModel -----------------------------------------------------------------------------------------------------------


def test_saved_model_is_served_from_another_place(exported, predicted, tmp_path, capsys):
    path = shutil.copytree(exported("saved_model")[0], tmp_path / "1")
    with flagsaver.flagsaver():  # saved_model_cli show
        flags.FLAGS(["show", f"--dir={path}", "--tag_set=serve", "--signature_def=serving_default"])
        saved_model_cli.show()
    shown = capsys.readouterr().out
    assert "inputs['images'] tensor_info:\n      dtype: DT_UINT8\n      shape: (-1, -1, -1, 3)" in shown
    assert "outputs['probabilities'] tensor_info:\n      dtype: DT_FLOAT\n      shape: (-1, 10)" in shown
    loaded = tf.saved_model.load(str(path))
    for size in ((32, 32), (48, 64)):
        images, answers = predicted(*size)
        for signature, names in (("serving_default", {"class_names"}), ("serve", set())):
            for count in (1, 7):
                outputs = loaded.signatures[signature](images=tf.constant(images[:count]))
                assert set(outputs) == {"probabilities", "class_name"} | names
                assert {len(outputs[name]) for name in ("probabilities", "class_name")} == {count}
                check(answers, {name: output.numpy() for name, output in outputs.items()})
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected to be a uint8 tensor but is a float"):
        loaded.signatures["serving_default"](images=tf.zeros([1, 32, 32, 3]))


def test_saved_model_has_its_weights_once_and_their_gradients(exported):
    path, _ = exported("saved_model")
    net = keras.models.load_model(exported("keras")[0])
    loaded = tf.saved_model.load(str(path))
    for name in ("variables", "trainable_variables"):
        sizes, expected = (
            sorted(int(np.prod(variable.shape)) for variable in getattr(model, name)) for model in (loaded, net)
        )
        assert sizes == [size for size in expected if name == "trainable_variables" or size in sizes]
    total = sum(int(np.prod(variable.shape)) for variable in loaded.variables)
    assert 4 * total <= (path / "variables/variables.data-00000-of-00001").stat().st_size < 4 * total + 20_000
    with tf.GradientTape() as tape:
        first = loaded.serve(tf.constant(IMAGES))["probabilities"][:, 0]
    assert all(np.abs(gradient).max() > 0 for gradient in tape.gradient(first, loaded.trainable_variables))


def test_saved_model_is_a_layer_of_keras(exported, predicted):
    images, answers = predicted()
    layer = keras.layers.TFSMLayer(str(exported("saved_model")[0]))
    model = keras.Sequential([keras.Input((None, None, 3), dtype="uint8"), layer])
    outputs = model.predict(images, batch_size=3, verbose=0)
    assert {name: len(output) for name, output in outputs.items()} == {"probabilities": 7, "class_name": 7}
    check(answers, outputs)


# Keras ----------------------------------------------------------------------------------------------------------------


def test_keras_file_is_loaded_under_other_settings_saved_and_exported_again(exported, predicted, tmp_path):
    images, answers = predicted()
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_image_data_format("channels_first")
    try:
        model = keras.models.load_model(exported("keras")[0])
        check(answers, model.predict(images, batch_size=3, verbose=0))
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.set_image_data_format("channels_last")
    model.save(tmp_path / "again.keras")
    check(answers, keras.models.load_model(tmp_path / "again.keras")(images))
    model.export(str(tmp_path / "net"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "net"))
    check(answers, {name: output.numpy() for name, output in loaded.serve(tf.constant(images)).items()})
    model.export(str(tmp_path / "net.tflite"), format="litert", verbose=False)
    check(answers, open_litert((tmp_path / "net.tflite").read_bytes())(images=images))


def test_keras_file_is_fine_tuned_as_documented(exported, tmp_path, monkeypatch):
    path, _ = exported("keras")
    monkeypatch.chdir(tmp_path)
    shutil.copy(path, "model.keras")
    names = {"images": SMALL[0].images[:200], "labels": SMALL[0].labels[:200]}
    exec(documented("model.compile("), names)
    model = names["model"]
    assert len(model.trainable_variables) == 15  # kernels of 7 convolutions and the head, a bias, 6 norms
    losses = model.history.history["loss"]
    assert losses[-1] < 0.95 * losses[0]
    before, tuned = (keras.models.load_model(name) for name in ("model.keras", "tuned.keras"))
    for old, new, current in zip(*(m.trainable_variables for m in (before, tuned, model)), strict=True):
        assert (old.numpy() != new.numpy()).any() and (new.numpy() == current.numpy()).all()
    np.testing.assert_allclose(tuned(IMAGES)["probabilities"], model(IMAGES), atol=1e-6)


# ONNX -----------------------------------------------------------------------------------------------------------------


def test_onnx_is_valid_and_takes_any_batch(exported, predicted):
    path, _ = exported("onnx")
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    for size in ((32, 32), (48, 64)):
        images, answers = predicted(*size)
        for count in (1, 7):
            outputs = dict(zip(names, session.run(names, {"images": images[:count]}), strict=True))
            assert {len(outputs[name]) for name in ("probabilities", "class_name")} == {count}
            check(answers, outputs)


def test_onnx_is_quantized(exported, predicted, tmp_path):
    path, _ = exported("onnx")
    quantize_dynamic(str(path), str(tmp_path / "int8.onnx"), weight_type=QuantType.QUInt8)
    assert (tmp_path / "int8.onnx").stat().st_size < 0.4 * path.stat().st_size
    images, answers = predicted()
    session = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"))
    check(answers, {"probabilities": session.run(["probabilities"], {"images": images})[0]}, ATOL["int8"])
