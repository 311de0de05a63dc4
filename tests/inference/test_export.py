"""Exports in all formats: read by their own libraries, without this package, and compared with the checkpoint."""

import dataclasses
import subprocess
import sys

import keras
import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EXPORT_FORMATS, ExportConfig, PredictConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import RunError, UsageError
from cifar_towers.inference import export
from cifar_towers.inference.export import export_model
from cifar_towers.inference.predict import predict_probabilities
from tests.runs import short_runs

SMALL = synthetic.make(400, 0, 0), synthetic.make(200, 0, 1)
IMAGES = SMALL[1].images[:7]
CONFIG = TrainConfig(
    num_gpus=1, dataset="synthetic", batch_size=50, epochs=2, precision="float32", shift=0, learning_rate=0.05,
    summary_every_steps=0, eval_every_epochs=0.0, ema_decay=0.5,
)  # fmt: skip
RUNS = {  # all layers of the project's models, and both kinds of preprocessing, with and without a crop
    "speednet": {"model": "speednet_proxy"},
    "cifarnet": {"model": "cifarnet", "crop": 23, "standardize": "image"},
    "resnet": {"model": "resnet20", "max_steps": 2},
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
    """Train a run of each kind; return their directories by name."""
    directories = {name: tmp_path_factory.mktemp(name) / "run" for name in RUNS}
    with short_runs.small_runs(*SMALL):
        for name, settings in RUNS.items():
            short_runs.run(CONFIG, directories[name], **settings)
        yield directories


def export_with(run, **settings):
    export_model(ExportConfig(train_dir=str(run), num_gpus=1, **({"check": 100} | settings)))


@pytest.mark.parametrize("name", RUNS)
def test_exports_run_without_this_package(runs, tmp_path, capsys, name):
    program = "import sys\nsys.modules['cifar_towers'] = None\nimport numpy as np\nimages = np.load('images.npy')\n"
    for kind in EXPORT_FORMATS:
        export_with(runs[name], format=kind)
        folder = runs[name] / "export" / kind
        assert f"{folder}: {runs[name]} at step" in (out := capsys.readouterr().out)
        assert "ema weights" in out and "on 100 test images the largest difference of a probability is" in out
        assert (folder / "classes.txt").read_text().splitlines() == list(synthetic.CLASSES)
        program += f"folder = {str(folder)!r}\n{READ[kind]}\nnp.save({kind!r}, probabilities)\n"
    np.save(tmp_path / "images.npy", IMAGES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    config = PredictConfig(train_dir=str(runs[name]), pictures=("images",), precision="float32")
    expected = predict_probabilities(config, IMAGES)
    assert np.ptp(expected) > 0.02
    for kind in EXPORT_FORMATS:
        np.testing.assert_allclose(np.load(tmp_path / f"{kind}.npy"), expected, rtol=0, atol=1e-5)


def test_formats_have_one_list():
    assert tuple(export.FORMATS) == EXPORT_FORMATS


def test_an_export_that_disagrees_or_fails_leaves_nothing(runs, tmp_path, monkeypatch):
    def uniform(path):
        return lambda images: np.full((len(images), 10), np.nan)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    out, formats = tmp_path / "net", {"onnx": ("model.onnx", uniform)}
    for name, replacement, error in (("FORMATS", formats, RunError), ("write_model", full_disk, OSError)):
        with monkeypatch.context() as patch, pytest.raises(error, match="more than the 1e-04|No space"):
            patch.setattr(export, name, replacement)
            export_with(runs["cifarnet"], format="onnx", out=str(out))
        assert not list(tmp_path.iterdir())
    out.mkdir()
    with pytest.raises(UsageError, match="net exists; move it away, or give another --out"):
        export_with(runs["cifarnet"], out=str(out))


def test_check_can_be_skipped_where_the_data_are_missing(runs, tmp_path, capsys):
    export_with(runs["cifarnet"], format="keras", out=str(tmp_path / "net"), dataset="folder:/nowhere", check=0)
    assert capsys.readouterr().out.endswith("; not checked\n")


def test_keras_file_is_trained_on(runs, tmp_path):
    export_with(runs["speednet"], format="keras", out=str(tmp_path / "net"), check=0)
    model = keras.models.load_model(tmp_path / "net/model.keras")
    model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy")
    losses = model.fit(SMALL[0].images[:200], SMALL[0].labels[:200], batch_size=50, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < 0.95 * losses[0]


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
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(x)))
"""


def test_own_model_with_a_layer_of_its_own_is_exported(runs, tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    config = dataclasses.replace(CONFIG, model=f"{tmp_path / 'nets.py'}:net", max_steps=2)
    short_runs.run(config, tmp_path / "run")
    for kind in EXPORT_FORMATS:
        export_with(tmp_path / "run", model=config.model, format=kind)
