"""What a trained net is exported as: the net with what comes before and after it, and the formats that hold it.

It takes uint8 pictures of any size and gives probabilities and the name of the likeliest class. All that is done to a
picture before the net sees it is inside, as operations that every format has.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from cifar_towers.data.augment import Augmentation

ONNX_OPSET = 17


class Format(NamedTuple):
    """How a net is written in one format and run again by what that format is for."""

    name: str  # of the file or directory
    needs: tuple[str, ...]  # modules beside the project's own
    write: Callable[["ServingModule", Path], None]
    open: Callable[[Path], Callable[[np.ndarray], np.ndarray]]  # -> uint8 images [B, H, W, 3] -> probabilities [B, C]
    is_directory: bool = False


class ServingModule(tf.Module):
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


def _write_saved_model(deployed: tf.Module, path: Path) -> None:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)  # it is for inference
    tf.saved_model.save(deployed, str(path), signatures={"serving_default": deployed.serve}, options=options)


def _open_saved_model(path: Path):
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda images: serve(images=tf.constant(images))["probabilities"].numpy()


def _write_keras(deployed: ServingModule, path: Path) -> None:
    deployed_model(deployed).save(path)


def deployed_model(deployed: ServingModule) -> keras.Model:
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
        variance = np.square(augmentation.std)
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


def _write_litert(deployed: ServingModule, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # only from there the converter keeps the signature
        _write_saved_model(_frozen(deployed), Path(directory))
        converter = tf.lite.TFLiteConverter.from_saved_model(directory, signature_keys=["serving_default"])
        path.write_bytes(converter.convert())


def _frozen(deployed: ServingModule) -> tf.Module:
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


def _write_onnx(deployed: ServingModule, path: Path) -> None:
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
