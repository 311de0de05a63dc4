"""Exports: one contract of all formats, each read by its own library, without this package."""

import dataclasses
import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EXPORT_FORMATS, ComputeConfig, ExportConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import DataError, RunError, UsageError
from cifar_towers.inference import export
from cifar_towers.inference.predict import predict_probabilities
from cifar_towers.runs.checkpoint import checkpoint_path, write_checkpoint
from cifar_towers.runs.run import load_run
from cifar_towers.training import build
from tests.helpers import short_runs

TRAIN = synthetic.make(200, 0, 0)
TEST = synthetic.make(100, 0, 1)
IMAGES = TEST.images[:7]
NETS = """
import keras

@keras.saving.register_keras_serializable()
class Shift(keras.layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(name="shift", shape=shape[-1:])

    def call(self, x):
        return x + self.shift

def net(num_classes):
    images = keras.Input((32, 32, 3))
    x = keras.layers.BatchNormalization()(Shift()(keras.layers.Conv2D(8, 3, 2)(images)))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(x))
"""
# all layers of the project's models, both kinds of preprocessing, with and without a crop, and an
# own layer
RUNS = {
    "speednet": {"model": "speednet93"},
    "cifarnet": {"model": "cifarnet", "crop": 23, "standardize": "image"},
    "resnet": {"model": "resnet20"},
    "own": {"model": "nets.py:net", "batch_statistics": "synchronized"},
}
READ = {  # how a user reads each format, as in docs/inference.md
    "saved_model": "import tensorflow as tf\n"
    "net = tf.saved_model.load(folder).signatures['serving_default']\n"
    "probabilities = net(images=tf.constant(images))['output_0'].numpy()",
    "keras": "import keras\n"
    "probabilities = keras.models.load_model(f'{folder}/model.keras').predict(images, verbose=0)",
    "litert": "from ai_edge_litert.interpreter import Interpreter\n"
    "net = Interpreter(f'{folder}/model.tflite').get_signature_runner()\n"
    "probabilities = net(images=images)['output_0']",
    "onnx": "import onnxruntime\n"
    "net = onnxruntime.InferenceSession(f'{folder}/model.onnx')\n"
    "(probabilities,) = net.run(None, {'images': images})",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write a run of each kind; return the settings that name it and its model, by the run's
    name.
    """
    place = tmp_path_factory.mktemp("runs")
    (place / "nets.py").write_text(NETS)
    named = {name: {"train_dir": str(place / name)} for name in RUNS}
    named["own"]["model"] = f"{place}/nets.py:net"
    with short_runs.small_runs(TRAIN, TEST):
        for name, settings in RUNS.items():
            write_run(TrainConfig(**{"ema_decay": 0.5} | settings | named[name]))
        yield named


def write_run(config):
    """Write the checkpoint of a run, as after training: no norm has variances or scales of one,
    nothing is zero.
    """
    random = np.random.default_rng(0)
    info = TEST.info
    keras.utils.set_random_seed(0)
    model = build.make_model(config, "float32", info)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    for variable in variables:
        low, high = (-0.4, 0.6) if variable.path.endswith(("variance", "gamma")) else (-0.1, 0.1)
        variable.assign_add(random.uniform(low, high, variable.shape))

    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    head = dense[-1]
    images = build.make_augmentation(config, info).evaluate(IMAGES)
    # no class is the likeliest of all images
    mean = np.mean(keras.Model(model.input, head.input)(images), 0)
    head.kernel.assign_sub(np.outer(mean, mean @ np.array(head.kernel)) / (mean @ mean))
    head.kernel.assign(head.kernel / np.std(model(images), 0).mean())

    values = {}
    for variable in variables:
        values[f"ema.{variable.path.replace('/', '.')}"] = variable.value.numpy()
    facts = {
        "facts": {"precision": "float32"},
        "dataset": "synthetic",
        "dataset_info": info._asdict(),
    }
    config.directory.mkdir()
    write_checkpoint(checkpoint_path(config.directory, 3), values, {"step": 3, **facts})
    (config.directory / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


@pytest.fixture(scope="module")
def expected(runs):
    """Return the probabilities that each run's checkpoint gives to the images."""
    configs = {name: ComputeConfig(**run, precision="float32") for name, run in runs.items()}
    return {name: predict_probabilities(config, IMAGES) for name, config in configs.items()}


def export_with(run, **settings):
    export.export_model(ExportConfig(**{"num_gpus": 1, "check": 100, **run, **settings}))


@pytest.mark.parametrize(
    "names", [("speednet", "cifarnet", "own"), pytest.param(("resnet",), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", EXPORT_FORMATS)
def test_every_format_gives_the_checkpoints_probabilities_without_this_package(
    runs, expected, tmp_path, kind, names
):
    """A layer of the user's own needs its code only in the format keras, and is checked by the
    export itself.
    """
    program = "import sys\nsys.modules['cifar_towers'] = None\n"
    program += "import numpy as np\nimages = np.load('images.npy')\n"
    np.save(tmp_path / "images.npy", IMAGES)
    for name in names:
        check = 100 if name == "own" else 0
        export_with(runs[name], format=kind, out=str(tmp_path / name), check=check)
        assert (tmp_path / name / "classes.txt").read_text().splitlines() == list(synthetic.CLASSES)

    read = [name for name in names if (name, kind) != ("own", "keras")]
    for name in read:
        program += f"folder = {name!r}\n{READ[kind]}\nnp.save('{name}.npy', probabilities)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, cwd=tmp_path, text=True
    )

    assert done.returncode == 0, done.stderr

    for name in read:
        assert expected[name].std(0).max() > 0.05
        np.testing.assert_allclose(
            np.load(tmp_path / f"{name}.npy"), expected[name], rtol=0, atol=1e-5, err_msg=name
        )


def write_nothing(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("patched", "value", "settings", "error", "named"),
    [
        (
            "FORMATS",
            {"onnx": ("model.onnx", lambda path: lambda x: np.full((len(x), 10), np.nan))},
            {},
            RunError,
            "nan",
        ),
        ("write_model", write_nothing, {}, OSError, "No space"),
        ("MAX_DIFFERENCE", 1e-4, {"dataset": "folder:/nowhere"}, DataError, "/nowhere"),
        ("MAX_DIFFERENCE", 1e-4, {"out": "."}, UsageError, r"^\. "),
        ("find_spec", lambda name: None, {}, UsageError, r"tf2onnx: pip install -e '\.\[export\]'"),
    ],
    ids=["disagrees", "disk full", "no data", "exists", "not installed"],
)
def test_an_export_that_disagrees_or_fails_leaves_nothing(
    runs, tmp_path, monkeypatch, patched, value, settings, error, named
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, patched, value)
    with pytest.raises(error, match=named):
        export_with(runs["own"], **{"format": "onnx", "out": "net"} | settings)
    assert not list(tmp_path.iterdir())


def test_keras_file_is_trained_on(runs, tmp_path):
    """And without a check, no data are needed."""
    settings = {"out": str(tmp_path / "net"), "dataset": "folder:/nowhere", "check": 0}
    export_with(runs["speednet"], format="keras", **settings)
    model = keras.models.load_model(tmp_path / "net/model.keras")
    model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy")
    fit = model.fit(TRAIN.images, TRAIN.labels, batch_size=50, epochs=3, verbose=0)
    losses = fit.history["loss"]

    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", RUNS)
def test_model_of_a_run_computes_the_same_under_a_policy_of_the_caller(runs, expected, name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = load_run(runs[name]["train_dir"]).model(model=runs[name].get("model", ""))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(model.predict(IMAGES, verbose=0), expected[name], rtol=0, atol=1e-5)
