"""Export of a trained model with its preprocessing, in four formats, checked against the
checkpoint.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.config.programs import ExportConfig
from cifar_towers.data import sources
from cifar_towers.errors import RunError, UsageError
from cifar_towers.inference.predict import TrainedModel
from cifar_towers.models.layers import (
    Activation,
    AddReLU,
    BatchNorm,
    Conv2D,
    LocalResponseNorm,
    PadChannels,
)
from cifar_towers.models.speednet import Whitening
from cifar_towers.runs.run import load_run

# of a probability; rounding explains 2e-5, as the project's convolutions are Winograd's
MAX_DIFFERENCE = 1e-4
BATCH_SIZE = 250  # images of the check
CLASSES = "classes.txt"  # the classes' names in the order of the probabilities, one a line

# the weights are set once the layer is built
LayerAndWeights = tuple[keras.layers.Layer, list[np.ndarray]]
ReadFn = Callable[[np.ndarray], np.ndarray]  # uint8 images [B, S, S, 3] -> probabilities [B, C]


def export_model(config: ExportConfig) -> None:
    """Write the model and its class names into a new directory, whole or not at all.

    Before the directory gets its name, the format's own library reads the model and classifies test
    images.

    Raises:
      UsageError: there is no such run, or `out` exists. DataError: there are no data to check on.
      RunError: the exported model does not agree with the checkpoint.
    """
    if config.out:
        out = Path(config.out)
    else:
        out = load_run(config.train_dir).directory / "export" / config.format
    if out.exists():
        raise UsageError(f"{out} exists; move it away, or give another --out")
    missing = [name for name in NEEDED.get(config.format, ()) if not find_spec(name)]
    if missing:
        raise UsageError(
            f"format={config.format} needs {missing[0]}: pip install -e '.[export]' in the clone"
        )
    trained = TrainedModel(config)
    source = None
    if config.check:
        source = sources.find(config.dataset or trained.metadata["dataset"], config.data_dir)

    out.parent.mkdir(parents=True, exist_ok=True)
    with _exact(), tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        directory = Path(temporary) / "export"
        directory.mkdir()
        file, make_reader = FORMATS[config.format]
        path = directory / file
        write_model(make_portable_model(trained), path, config.format)
        (directory / CLASSES).write_text("".join(f"{name}\n" for name in trained.info.class_names))

        checked = "not checked"
        if source:
            test = sources.load_split(source, "test", trained.info.image_size)
            checked = _check(make_reader(path), trained, test.images[: config.check])
        directory.rename(out)
    print(
        f"{out}: {trained.run.directory} at step {trained.metadata['step']}, {trained.weights} "
        f"weights; {checked}"
    )


def _check(read: ReadFn, trained: TrainedModel, images: np.ndarray) -> str:
    """Compare an exported model with the checkpoint; return the line that says how far they differ.

    Raises:
      RunError: they differ by more than rounding.
    """
    starts = range(0, len(images), BATCH_SIZE)
    found = np.concatenate([read(images[start : start + BATCH_SIZE]) for start in starts])
    difference = np.abs(found - trained.probabilities(images)).max()
    checked = (
        f"on {len(images):,} test images the largest difference of a probability is "
        f"{difference:.1e}"
    )
    if not difference <= MAX_DIFFERENCE:  # also if it is NaN
        raise RunError(
            f"{checked}, more than the {MAX_DIFFERENCE:.0e} that rounding explains; nothing is kept"
        )
    return checked


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Leave out TensorFloat-32 inside: its ten bits are too few to compare with."""
    options = tf.config.experimental
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    options.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        options.enable_tensor_float_32_execution(before)


def make_portable_model(trained: TrainedModel) -> keras.Model:
    """Put preprocessing and a softmax around a model, in operations of Keras that every format has.

    Returns:
      A model: uint8 images [B, S, S, 3] of the training's size -> probabilities [B, C] float32.
    """
    augmentation = trained.augmentation
    size = trained.info.image_size
    images = keras.Input((size, size, 3), dtype="uint8", name="images")
    x = keras.ops.cast(images, "float32")
    crop = augmentation.settings.crop
    if crop:  # the center, as `Augmentation.evaluate`
        before = (size - crop) // 2
        sides = (before, size - crop - before)
        x = keras.layers.Cropping2D((sides, sides), dtype="float32", name="crop")(x)
    if augmentation.settings.standardize == "dataset":
        x = (x - np.array(augmentation.mean, "f4")) / np.array(augmentation.std, "f4")
    else:  # as `tf.image.per_image_standardization`
        smallest = float(np.prod(x.shape[1:])) ** -0.5
        std = keras.ops.std(x, [1, 2, 3], keepdims=True)
        x = (x - keras.ops.mean(x, [1, 2, 3], keepdims=True)) / keras.ops.maximum(std, smallest)
    logits = to_stock_layers(trained.model)(x, training=False)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    return keras.Model(images, probabilities, name="portable")


def write_model(model: keras.Model, path: Path, file_format: str) -> None:
    """Write a model by Keras. The path of a `saved_model` is a directory, that of another format a
    file.
    """
    if file_format == "keras":
        model.save(path)
    else:
        images = tf.TensorSpec([None, *model.input.shape[1:]], tf.uint8, name="images")
        keras_name = file_format.replace("saved_model", "tf_saved_model")
        model.export(path, format=keras_name, verbose=False, input_signature=[images])


# Copies of the project's layers in stock Keras layers, which load without this package ------------


def to_stock_layers(model: keras.Model) -> keras.Model:
    """Return a model of stock layers with the same weights and outputs in evaluation; `model`
    itself if it is one.
    """
    if not any(type(layer) in STOCK_EQUIVALENTS for layer in model.layers):
        return model
    weights: dict[str, list[np.ndarray]] = {}

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        copy, weights[layer.name] = STOCK_EQUIVALENTS.get(type(layer), _same_layer)(layer)
        return copy

    copy = keras.models.clone_model(model, clone_function=clone)
    for layer in copy.layers:
        layer.set_weights(weights.get(layer.name, []))
    return copy


def _same_layer(layer: keras.layers.Layer) -> LayerAndWeights:
    """Return Keras's layer of the same configuration, and the weights of `layer`.

    Initializers become zeros, because they may be the project's.
    """
    settings = layer.get_config()
    settings |= {name: "zeros" for name in settings if name.endswith("_initializer")}
    settings.pop("even_output", None)  # the pooling behind it discards the rest
    is_convolution = isinstance(layer, (Conv2D, Whitening))
    layer_class = keras.layers.Conv2D if is_convolution else type(layer)
    return layer_class.from_config(settings), layer.get_weights()


def _batch_norm(layer: BatchNorm) -> LayerAndWeights:
    copy = keras.layers.BatchNormalization(
        momentum=layer.momentum, epsilon=layer.epsilon, scale=layer.scale, **_common(layer)
    )
    weights = [layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance]
    return copy, [weight.numpy() for weight in weights if weight is not None]


def _pad_channels(layer: PadChannels) -> LayerAndWeights:
    """Return a 1x1 convolution with a stride, whose kernel is ones and zeros."""
    channels = layer.input.shape[-1]
    kernel = np.eye(channels, layer.channels, (layer.channels - channels) // 2, dtype="f4")
    copy = keras.layers.Conv2D(layer.channels, 1, layer.stride, use_bias=False, **_common(layer))
    return copy, [kernel[None, None]]


def _local_response_norm(layer: LocalResponseNorm) -> LayerAndWeights:
    """Return a model that sums the squares of neighboring channels by a 1x1 convolution."""
    shape = layer.input.shape[1:]
    channels = np.arange(shape[-1])
    kernel = layer.alpha * (abs(channels[:, None] - channels) <= layer.radius)
    images = keras.Input(shape)
    sum_squares = keras.layers.Conv2D(
        shape[-1], 1, use_bias=False, name=f"{layer.name}_sum", dtype="float32"
    )
    squares = sum_squares(keras.ops.square(images))
    copy = keras.Model(
        images, images * keras.ops.power(layer.bias + squares, -layer.beta), name=layer.name
    )
    return copy, [kernel[None, None].astype("f4")]


def _activation(layer: Activation) -> LayerAndWeights:
    if layer.function != "gelu":
        return keras.layers.Activation(layer.function, **_common(layer)), []
    x = keras.Input(layer.input.shape[1:])
    return keras.Model(x, 0.5 * x * (1 + keras.ops.erf(x * 0.5**0.5)), name=layer.name), []


def _add_relu(layer: AddReLU) -> LayerAndWeights:
    inputs = [keras.Input(tensor.shape[1:]) for tensor in layer.input]
    output = keras.ops.relu(inputs[0] + inputs[1])
    return keras.Model(inputs, [output, output], name=layer.name), []


def _common(layer: keras.layers.Layer) -> dict[str, Any]:
    return {"name": layer.name, "dtype": layer.dtype_policy}


STOCK_EQUIVALENTS: dict[type, Callable[..., LayerAndWeights]] = {
    Conv2D: _same_layer,
    Whitening: _same_layer,
    BatchNorm: _batch_norm,
    Activation: _activation,
    AddReLU: _add_relu,
    PadChannels: _pad_channels,
    LocalResponseNorm: _local_response_norm,
}


# How each format is read by its own library: path -> function -------------------------------------


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


# name -> packages that write or check it
NEEDED = {"litert": ["ai_edge_litert"], "onnx": ["tf2onnx", "onnxruntime"]}
# name -> file in the export, function that reads it
FORMATS: dict[str, tuple[str, Callable[[Path], ReadFn]]] = {
    "saved_model": ("", _read_saved_model),
    "keras": ("model.keras", _read_keras),
    "litert": ("model.tflite", _read_litert),
    "onnx": ("model.onnx", _read_onnx),
}
