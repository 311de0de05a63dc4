"""A trained net as a file for use elsewhere, held against the checkpoint it came from.

What is written takes uint8 pictures of any size and gives probabilities and the name of the likeliest class. All that
is done to a picture before the net sees it is inside, as operations that every format has.
"""

import importlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from cifar_towers import trained
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import Split
from cifar_towers.errors import RunError, UsageError, reason
from cifar_towers.evaluation import make_classifier, softmax
from cifar_towers.models.plain import plain
from cifar_towers.program_configs import ExportConfig
from cifar_towers.towers import Tower
from cifar_towers.training import setup

AGREE = 1e-4  # largest difference of a probability that rounding explains
AT_ONCE = 250  # images of the check
ONNX_OPSET = 17


class Format(NamedTuple):
    """How a net is written in one format and run again by what that format is for."""

    name: str  # of the file or directory
    needs: tuple[str, ...]  # modules beside the project's own
    write: Callable[["Deployed", Path], None]
    open: Callable[[Path], Callable[[np.ndarray], np.ndarray]]  # -> uint8 images [B, H, W, 3] -> probabilities [B, C]
    is_directory: bool = False


class Deployed(tf.Module):
    """A net with what comes before and after it: uint8 pictures -> probabilities and names.

    Args:
      net: images as `augmentation` makes them -> logits; of stock layers, in float32.
      side: pixels of the square that a picture's central one is resized to.
    """

    def __init__(self, net: keras.Model, augmentation: Augmentation, side: int, class_names: tuple[str, ...]):
        super().__init__(name="deployed")
        self.net, self.augmentation, self.side, self.class_names = net, augmentation, side, class_names

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")], autograph=False)
    def serve(self, images):
        """[B, H, W, 3] uint8 -> {probabilities [B, C] float32, class_name [B] and class_names [C] strings}."""
        levels = fit(tf.cast(images, tf.float32), self.side)
        probabilities = tf.nn.softmax(self.net(self.augmentation.evaluate(levels), training=False))
        names = tf.constant(self.class_names)
        best = tf.gather(names, tf.argmax(probabilities, 1))
        return {"probabilities": probabilities, "class_name": best, "class_names": names}


def export(config: ExportConfig) -> bool:
    """Writes the net, runs what was written, and says where it is and how far it is from the checkpoint; whether it
    agrees. If so it replaces what was there before; if not, both are kept.

    Raises:
      UsageError: there is no such run, or a package is missing. DataError: there is no data to check on.
    """
    kind = FORMATS[config.format]
    _require(config.format, kind.needs)
    run = trained.open_run(Path(config.train_dir), config.model)
    place = Path(config.out) if config.out else run.directory / "export" / kind.name
    _refuse_to_replace(place, kind)
    source = sources.find(config.dataset or run.facts["dataset"], config.data_dir) if config.check else None
    towers = setup.open_towers(config)
    weights = run.choose_weights(config.weights)
    net = run.load(weights, "float32")
    some = _test_images(source, run, config.check) if source else None
    own = _probabilities(net, towers, run, some) if some else None
    deployed = Deployed(plain(net), run.augmentation, run.traits.side, run.traits.class_names)
    new = place.with_name(f".new-{place.name}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove(new)
        kind.write(deployed, new)
        with keras.saving.custom_object_scope(_own_layers(net)):
            wrong = _check(kind, new, own, some) if some else ""
        stands = _keep_aside(new, place) if wrong else _put(new, place)
    except Exception as error:  # converters have errors of all kinds
        raise RunError(f"{place} cannot be written ({_told(error)})") from error
    finally:
        _remove(new)
    told = f"{stands}: {run.directory} at step {run.facts['step']}, {weights} weights, {_size(stands) / 1e6:.1f} MB"
    print(told if some else f"{told}, not checked")
    if wrong:
        earlier = f"; {place} is the earlier one" if place.exists() else ""
        print(f"{stands} {wrong}: do not use it{earlier}", file=sys.stderr)
    return not wrong


def _test_images(source: sources.Source, run: trained.Run, count: int) -> Split:
    _, dataset = sources.load(source, run.config.validation_examples, run.traits.side)
    return dataset.test.take(slice(count))


def _probabilities(net: keras.Model, towers: list[Tower], run: trained.Run, split: Split) -> np.ndarray:
    classify = make_classifier(net, towers, run.augmentation)
    return softmax(classify(split.images, *trained.variables_of(net))[0])


def _own_layers(net: keras.Model) -> dict[str, type]:
    """The classes of layers that are not Keras's, by their names: the `keras` format is read with them."""
    classes = {type(layer) for layer in net._flatten_layers(include_self=False)}
    return {kind.__name__: kind for kind in classes if not kind.__module__.startswith("keras.")}


def _check(kind: Format, path: Path, own: np.ndarray, split: Split) -> str:
    """What is wrong with an export, if anything; says how far it is from the net's `own` probabilities [n, C]."""
    try:
        call = kind.open(path)
        parts = [call(split.images[start : start + AT_ONCE]) for start in range(0, len(split.images), AT_ONCE)]
        theirs = np.concatenate(parts)
    except Exception as error:  # and so have interpreters
        return f"cannot be run here ({_told(error)})"
    furthest = float(np.abs(own - theirs).max()) if np.isfinite(theirs).all() else np.inf
    right = [int((table.argmax(1) == split.labels).sum()) for table in (own, theirs)]
    count = len(split.labels)
    print(
        f"checked on {count:,} test images: accuracy {100 * right[1] / count:.2f} %, the checkpoint's "
        f"{100 * right[0] / count:.2f} %; largest difference of a probability {furthest:.1e}"
    )
    return "" if furthest <= AGREE else f"differs by more than the {AGREE:.0e} that rounding explains"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error, 300)}"


def fit(images: tf.Tensor, side: int) -> tf.Tensor:
    """[B, H, W, C] float -> [B, side, side, C]: the central square, resized as `data.images.fit` does it, by two
    products with matrices, which every format has; images that fit already are left as they are."""
    shape = tf.shape(images)
    square = tf.minimum(shape[1], shape[2])
    rows, columns = (_window(shape[axis], square, side) for axis in (1, 2))
    planes = tf.transpose(images, [0, 3, 1, 2])
    planes = tf.matmul(tf.matmul(rows, planes), columns, transpose_b=True)
    return tf.ensure_shape(tf.transpose(planes, [0, 2, 3, 1]), [None, side, side, images.shape[3]])


def _window(length: tf.Tensor, square: tf.Tensor, side: int) -> tf.Tensor:
    """[side, length]: row i weighs the pixels of the central `square` of a line by a triangle about the place of output
    pixel i, as wide as an output pixel, or as an input pixel where these are larger."""
    ratio = tf.cast(square, tf.float32) / side
    places = tf.cast(tf.range(length) - (length - square) // 2, tf.float32)
    centres = (tf.range(side, dtype=tf.float32) + 0.5) * ratio - 0.5
    weights = tf.nn.relu(1 - tf.abs(places - centres[:, None]) / tf.maximum(ratio, 1.0))
    inside = tf.cast((places >= 0) & (places < tf.cast(square, tf.float32)), tf.float32)
    weights *= inside
    return weights / tf.reduce_sum(weights, 1, keepdims=True)


# The formats ------------------------------------------------------------------------------------------------------


def _write_saved_model(deployed: tf.Module, path: Path) -> None:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)  # it is for inference
    tf.saved_model.save(deployed, str(path), signatures={"serving_default": deployed.serve}, options=options)


def _open_saved_model(path: Path):
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda images: serve(images=tf.constant(images))["probabilities"].numpy()


def _write_keras(deployed: Deployed, path: Path) -> None:
    deployed_model(deployed).save(path)


def deployed_model(deployed: Deployed) -> keras.Model:
    """`deployed` as one Keras model of stock layers."""
    augmentation, side = deployed.augmentation, deployed.side
    images = keras.Input((None, None, 3), dtype="uint8", name="images")
    x = keras.layers.Resizing(
        side, side, "bilinear", crop_to_aspect_ratio=True, antialias=True, dtype="float32", name="fit"
    )(images)
    if augmentation.crop:
        x = keras.layers.CenterCrop(augmentation.crop, augmentation.crop, name="crop")(x)
        side = augmentation.crop
    if augmentation.standardize == "dataset":
        variance = np.square(augmentation.deviation)
        x = keras.layers.Normalization(mean=augmentation.mean, variance=variance, name="normalise")(x)
    else:
        mean = keras.ops.mean(x, [1, 2, 3], keepdims=True)
        deviation = keras.ops.std(x, [1, 2, 3], keepdims=True)
        x = (x - mean) / keras.ops.maximum(deviation, (3 * side**2) ** -0.5)
    logits = deployed.net(x, training=False)  # else a resizing layer before it lets it train wherever nothing is said
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    names = keras.layers.StringLookup(
        vocabulary=list(deployed.class_names), num_oov_indices=0, invert=True, name="class_name"
    )
    best = names(keras.ops.argmax(probabilities, 1))
    return keras.Model(images, {"probabilities": probabilities, "class_name": best}, name="deployed")


def _open_keras(path: Path):
    model = keras.models.load_model(path, compile=False)
    return lambda images: model(tf.constant(images))["probabilities"].numpy()


def _write_litert(deployed: Deployed, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # only from there the converter keeps the signature
        _write_saved_model(_frozen(deployed), Path(directory))
        converter = tf.lite.TFLiteConverter.from_saved_model(directory, signature_keys=["serving_default"])
        path.write_bytes(converter.convert())


def _frozen(deployed: Deployed) -> tf.Module:
    """The same with the weights as constants: the converter loses variables."""
    concrete = deployed.serve.get_concrete_function()
    constant = convert_variables_to_constants_v2(concrete)

    @tf.function(input_signature=deployed.serve.input_signature, autograph=False)
    def serve(images):
        return dict(zip(sorted(concrete.structured_outputs), constant(images), strict=True))

    frozen = tf.Module()
    frozen.serve = serve
    return frozen


def _open_litert(path: Path):
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    return lambda images: runner(images=images)["probabilities"]


def _write_onnx(deployed: Deployed, path: Path) -> None:
    import tf2onnx

    def erfc(graph, node, name, _):  # which TensorFlow's GELU is made of, and ONNX has not
        node.type = "Erf"
        one = graph.make_const(tf2onnx.utils.make_name("one"), np.ones(1, np.float32))
        graph.insert_new_node_on_output(
            "Sub", node.output[0], name=tf2onnx.utils.make_name(name), inputs=[one.output[0], node.output[0]]
        )

    tf2onnx.convert.from_function(
        deployed.serve,
        input_signature=deployed.serve.input_signature,
        opset=ONNX_OPSET,
        custom_op_handlers={"Erfc": (erfc, [])},
        output_path=str(path),
    )


def _open_onnx(path: Path):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return lambda images: session.run(["probabilities"], {entry.name: images})[0]


FORMATS = {
    "saved_model": Format("saved_model", (), _write_saved_model, _open_saved_model, is_directory=True),
    "keras": Format("model.keras", (), _write_keras, _open_keras),
    "litert": Format("model.tflite", ("ai_edge_litert",), _write_litert, _open_litert),
    "onnx": Format("model.onnx", ("tf2onnx", "onnxruntime"), _write_onnx, _open_onnx),
}


def _require(name: str, modules: tuple[str, ...]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            raise UsageError(
                f"format={name} needs {module.replace('_', '-')}, which is not installed; for it: "
                f"{sys.executable} -m pip install -e '.[export]'"
            ) from None


def _refuse_to_replace(place: Path, kind: Format) -> None:
    """What is replaced is an earlier export, and nothing else."""
    suffix = Path(kind.name).suffix
    if place.suffix != suffix and not kind.is_directory:
        better = place / kind.name if place.is_dir() else place.with_suffix(suffix)
        raise UsageError(f"--out={place} does not end in {suffix}; write --out={better}")
    earlier = (place / tf.saved_model.SAVED_MODEL_FILENAME_PB).exists() if kind.is_directory else place.is_file()
    empty = kind.is_directory and place.is_dir() and not any(place.iterdir())
    if place.exists() and not (earlier or empty):
        raise UsageError(f"{place} is there already and no {kind.name}; give another --out, or remove it")


def _put(new: Path, place: Path) -> Path:
    """Has what was written at `new` stand at `place`; returns `place`."""
    old = place.with_name(f".old-{place.name}")
    try:
        if place.is_dir():  # a file is replaced at once, a directory only when it is out of the way
            _remove(old)
            place.replace(old)
        new.replace(place)
    finally:
        if old.exists() and not place.exists():  # broken off between the two
            old.replace(place)
    _remove(old)
    return place


def _keep_aside(new: Path, place: Path) -> Path:
    """Has what was written at `new` stand beside `place`, under a name that nothing has; returns its path."""
    paths = (place.with_name(f"failed-{number}-{place.name}") for number in itertools.count(1))
    return new.replace(next(path for path in paths if not path.exists()))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
