"""Export of a trained model with its preprocessing, in four formats, checked against the checkpoint."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.config.programs import ExportConfig, TrainedRunConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError
from cifar_towers.evaluation.score import softmax
from cifar_towers.inference.load_run import TrainedRun, make_logits_fn, open_run
from cifar_towers.models.stock_layers import to_stock_layers
from cifar_towers.training.build import setup_towers

MAX_DIFFERENCE = 1e-4  # of a probability; rounding explains 2e-5, as the project's convolutions are Winograd's
BATCH_SIZE = 250  # images of the check
CLASSES = "classes.txt"  # the classes' names in the order of the probabilities, one a line
FILES = {"saved_model": "", "keras": "model.keras", "litert": "model.tflite", "onnx": "model.onnx"}

ReadFn = Callable[[np.ndarray], np.ndarray]  # uint8 images [B, S, S, 3] -> probabilities [B, C]


def export_model(config: ExportConfig) -> None:
    """Write the model and its class names into a new directory, whole or not at all.

    Before the directory gets its name, the format's own library reads the model and classifies test images.

    Raises:
      UsageError: there is no such run, or `out` exists. DataError: there are no data to check on.
      RunError: the exported model does not agree with the checkpoint.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    out = Path(config.out) if config.out else run.directory / "export" / config.format
    if out.exists():
        raise UsageError(f"{out} exists; move it away, or give another --out")
    weights = run.choose_weights(config.weights)
    source = sources.find(config.dataset or run.metadata["dataset"], config.data_dir) if config.check else None
    towers = setup_towers(config)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its ten bits are too few to compare with
    model = run.load(weights, "float32")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        directory = Path(temporary) / "export"
        directory.mkdir()
        path = directory / FILES[config.format]
        write_model(make_portable_model(run, model), path, config.format)
        (directory / CLASSES).write_text("".join(f"{name}\n" for name in run.info.class_names))
        checked = "not checked"
        if source:
            images = sources.load_split(source, "test", run.info.image_size).images[: config.check]
            expected = softmax(make_logits_fn(run, model, towers)(images))
            difference = _largest_difference(READERS[config.format](path), images, expected)
            checked = f"on {len(images):,} test images the largest difference of a probability is {difference:.1e}"
            if not difference <= MAX_DIFFERENCE:  # also if it is NaN
                raise RunError(f"{checked}, more than the {MAX_DIFFERENCE:.0e} that rounding explains; nothing is kept")
        directory.rename(out)
    print(f"{out}: {run.directory} at step {run.metadata['step']}, {weights} weights; {checked}")


def load_portable_model(config: TrainedRunConfig) -> keras.Model:
    """Return the model of a checkpoint with its preprocessing: uint8 images [B, S, S, 3] -> probabilities [B, C].

    Raises:
      UsageError: there is no such run. DataError: the checkpoint is damaged.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    return make_portable_model(run, run.load(run.choose_weights(config.weights), "float32"))


def make_portable_model(run: TrainedRun, model: keras.Model) -> keras.Model:
    """Put a run's preprocessing and a softmax around its model, in operations of Keras that every format has."""
    augmentation, size = run.augmentation, run.info.image_size
    images = keras.Input((size, size, 3), dtype="uint8", name="images")
    x = keras.ops.cast(images, "float32")
    if crop := augmentation.crop:
        sides = (size - crop) // 2, size - crop - (size - crop) // 2  # as `Augmentation.evaluate`
        x = keras.layers.Cropping2D((sides, sides), dtype="float32", name="crop")(x)
    if augmentation.standardize == "dataset":
        x = (x - np.array(augmentation.mean, "f4")) / np.array(augmentation.std, "f4")
    else:  # as `tf.image.per_image_standardization`
        smallest = float(np.prod(x.shape[1:])) ** -0.5
        std = keras.ops.std(x, [1, 2, 3], keepdims=True)
        x = (x - keras.ops.mean(x, [1, 2, 3], keepdims=True)) / keras.ops.maximum(std, smallest)
    logits = to_stock_layers(model)(x, training=False)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    return keras.Model(images, probabilities, name="portable")


def write_model(model: keras.Model, path: Path, file_format: str) -> None:
    """Write a model by Keras. The path of a `saved_model` is a directory, that of another format a file."""
    if file_format == "keras":
        model.save(path)
    else:
        images = tf.TensorSpec([None, *model.input.shape[1:]], tf.uint8, name="images")
        keras_name = file_format.replace("saved_model", "tf_saved_model")
        model.export(path, format=keras_name, verbose=False, input_signature=[images])


def _largest_difference(read: ReadFn, images: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference between the read model's probabilities [n, C] and the expected ones."""
    parts = [read(images[start : start + BATCH_SIZE]) for start in range(0, len(images), BATCH_SIZE)]
    return float(np.abs(np.concatenate(parts) - expected).max())


# How each format is read by its own library: path -> function --------------------------------------------------------


def _read_saved_model(path: Path) -> ReadFn:
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda images: serve(images=tf.constant(images))["output_0"].numpy()


def _read_keras(path: Path) -> ReadFn:
    model = keras.models.load_model(path, compile=False)
    return lambda images: model(tf.constant(images)).numpy()


def _read_litert(path: Path) -> ReadFn:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    return lambda images: runner(images=images)["output_0"]


def _read_onnx(path: Path) -> ReadFn:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


READERS: dict[str, Callable[[Path], ReadFn]] = {
    "saved_model": _read_saved_model,
    "keras": _read_keras,
    "litert": _read_litert,
    "onnx": _read_onnx,
}
