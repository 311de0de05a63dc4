"""Export formats, and the module that is exported: a model with its preprocessing and postprocessing.

The preprocessing consists of operations that every format supports.
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
from cifar_towers.inference.resizing import resize_square

ONNX_OPSET = 17


class Format(NamedTuple):
    """How to write a module in one format, and how to run what was written with that format's own library."""

    name: str  # of the file or directory
    packages: tuple[str, ...]  # needed besides the project's own
    write: Callable[["ServingModule", Path], None]
    open: Callable[[Path], Callable[[np.ndarray], np.ndarray]]  # -> uint8 images [B, H, W, 3] -> probabilities [B, C]
    is_directory: bool = False


class ServingModule(tf.Module):
    """A model with its preprocessing and postprocessing: uint8 images -> probabilities and names.

    Args:
      model: preprocessed images -> logits; of stock layers, in float32.
      side: pixels; the central square of an image is resized to it.
    """

    def __init__(self, model: keras.Model, augmentation: Augmentation, side: int, class_names: tuple[str, ...]):
        super().__init__(name="deployed")
        self.model, self.augmentation, self.side, self.class_names = model, augmentation, side, class_names

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")], autograph=False)
    def serve(self, images):
        """[B, H, W, 3] uint8 -> {probabilities [B, C] float32, class_name [B] and class_names [C] strings}."""
        levels = resize_square(tf.cast(images, tf.float32), self.side)
        probabilities = tf.nn.softmax(self.model(self.augmentation.evaluate(levels), training=False))
        names = tf.constant(self.class_names)
        class_name = tf.gather(names, tf.argmax(probabilities, 1))
        return {"probabilities": probabilities, "class_name": class_name, "class_names": names}


def _write_saved_model(module: tf.Module, path: Path) -> None:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)  # for inference only
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.serve}, options=options)


def _open_saved_model(path: Path):
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda images: serve(images=tf.constant(images))["probabilities"].numpy()


def _write_keras(module: ServingModule, path: Path) -> None:
    """Writes the module as one Keras model of stock layers."""
    augmentation, side = module.augmentation, module.side
    images = keras.Input((None, None, 3), dtype="uint8", name="images")
    x = resize_square(keras.ops.cast(images, "float32"), side)
    if augmentation.crop:
        x = keras.layers.CenterCrop(augmentation.crop, augmentation.crop, name="crop")(x)
        side = augmentation.crop
    if augmentation.standardize == "dataset":
        variance = np.square(augmentation.std)
        x = keras.layers.Normalization(mean=augmentation.mean, variance=variance, name="normalize")(x)
    else:
        mean = keras.ops.mean(x, [1, 2, 3], keepdims=True)
        std = keras.ops.std(x, [1, 2, 3], keepdims=True)
        x = (x - mean) / keras.ops.maximum(std, (3 * side**2) ** -0.5)
    logits = module.model(x, training=False)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    to_name = keras.layers.StringLookup(
        vocabulary=list(module.class_names), num_oov_indices=0, invert=True, name="class_name"
    )
    class_name = to_name(keras.ops.argmax(probabilities, 1))
    outputs = {"probabilities": probabilities, "class_name": class_name}
    keras.Model(images, outputs, name="deployed").save(path)


def _open_keras(path: Path):
    model = keras.models.load_model(path, compile=False)
    return lambda images: model(tf.constant(images))["probabilities"].numpy()


def _write_litert(module: ServingModule, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # the converter keeps the signature of saved models only
        _write_saved_model(_frozen(module), Path(directory))
        converter = tf.lite.TFLiteConverter.from_saved_model(directory, signature_keys=["serving_default"])
        path.write_bytes(converter.convert())


def _frozen(module: ServingModule) -> tf.Module:
    """The module with its weights as constants, as the LiteRT converter loses variables."""
    concrete = module.serve.get_concrete_function()
    constant = convert_variables_to_constants_v2(concrete)

    @tf.function(input_signature=module.serve.input_signature, autograph=False)
    def serve(images):
        return dict(zip(sorted(concrete.structured_outputs), constant(images), strict=True))

    frozen = tf.Module()
    frozen.serve = serve
    return frozen


def _open_litert(path: Path):
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    return lambda images: runner(images=images)["probabilities"]


def _write_onnx(module: ServingModule, path: Path) -> None:
    import tf2onnx

    def erfc(graph, node, name, _):  # part of TensorFlow's GELU; ONNX has only Erf
        node.type = "Erf"
        one = graph.make_const(tf2onnx.utils.make_name("one"), np.ones(1, np.float32))
        graph.insert_new_node_on_output(
            "Sub", node.output[0], name=tf2onnx.utils.make_name(name), inputs=[one.output[0], node.output[0]]
        )

    model, _ = tf2onnx.convert.from_function(
        module.serve,
        input_signature=module.serve.input_signature,
        opset=ONNX_OPSET,
        custom_op_handlers={"Erfc": (erfc, [])},
    )
    for value in (*model.graph.input, *model.graph.output):
        for axis, name in zip(value.type.tensor_type.shape.dim, ("batch", "height", "width"), strict=False):
            if axis.dim_param:  # a number that tf2onnx made up
                axis.dim_param = name
    path.write_bytes(model.SerializeToString())


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
