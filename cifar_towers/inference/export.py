"""Export of a trained model with its preprocessing, in several formats, checked against the checkpoint."""

import importlib.util
import itertools
import shlex
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers import devices, files
from cifar_towers.config.programs import ExportConfig, TrainedRunConfig
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, RunError, UsageError, count, error_line, error_text, listed
from cifar_towers.evaluation.score import NO_TEMPERATURE, fit_temperature, softmax
from cifar_towers.inference.load_run import TrainedRun, make_logits_fn, open_run
from cifar_towers.inference.model_card import write_card
from cifar_towers.inference.predict import resize_square
from cifar_towers.models.stock_layers import to_stock_layers
from cifar_towers.stderr import messages_only_of_a_failure

PROBABILITY_ATOL = 1e-4  # largest difference between probabilities that rounding explains
MEAN_ATOL = {"float16": 0.01, "int8": 0.1}  # quantized: mean over the images of the largest difference
MAX_ACCURACY_LOSS = 5  # percentage points that a quantized export may lose
BATCH_SIZE = 250  # images of the check
OTHER_SIZES = ((0.75, 1.0), (1.5, 2.0), (3.0, 2.5), (12.0, 15.0))  # of the check: height and width in image sizes
NUM_RESIZED = 20  # test images of 32 pixels that are checked in each of these sizes, or as many pixels of other images
NUM_CALIBRATION = 300  # training images that an int8 export is calibrated on
PREPROCESSING = "preprocessing"  # name scope of the operations that an int8 export computes in float32
SAVED_MODEL_FILES = {"saved_model.pb", "fingerprint.pb", "variables", "assets", "README.md"}
ONNX_OPSET = 17
DISK_ERRORS = (OSError, tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError)

RunFn = Callable[[np.ndarray], np.ndarray]  # [B, H, W, 3] uint8 images -> [B, C] probabilities, or logits


class Format(NamedTuple):
    """A format of exports, with functions to write a module in it and to run what was written."""

    name: str  # of the file; without a suffix, of the directory
    packages: tuple[str, ...]  # needed besides the project's own
    write: Callable[..., None]  # (module, path)
    open: Callable[[Path], RunFn]  # by the format's own library


def export_model(config: ExportConfig) -> bool:
    """Write the model, run what was written on test images, and return whether it agrees with the checkpoint.

    An export that agrees replaces an earlier one. An export that does not is kept beside it under another name.

    Raises:
      UsageError: there is no such run, or a package is missing. DataError: there are no data to check on.
      RunError: the export cannot be written, or the model cannot be converted.
    """
    file_format = FORMATS[config.format]
    if config.quantize:
        file_format = file_format._replace(name=f"model-{config.quantize}.tflite")
    if missing := [name for name in file_format.packages if not importlib.util.find_spec(name)]:
        raise UsageError(
            f"format={config.format} needs {missing[0].replace('_', '-')}, which is not installed; to install it: "
            f"{sys.executable} -m pip install -e '.[export]'"
        )
    run = open_run(Path(config.train_dir), config.model, config.step)
    path = Path(config.out) if config.out else run.directory / "export" / file_format.name
    _check_path(path, file_format.name)
    weights, image_size = run.choose_weights(config.weights), run.info.image_size
    source = _find_source(config, run) if config.check or config.quantize == "int8" or not config.temperature else None
    towers = devices.setup_towers(config)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its ten bits are too few to compare with
    model = run.load(weights, "float32")
    logits_of = make_logits_fn(run, model, towers)
    samples, labels = [], np.zeros(0, np.int64)
    options: dict[str, Any] = {"quantize": config.quantize} if config.quantize else {}
    if source and config.quantize == "int8":
        _, dataset = sources.load(source, run.config.validation_examples, image_size)
        train, test = dataset.train.images, dataset.test
        options["examples"] = train[np.linspace(0, len(train) - 1, NUM_CALIBRATION, dtype=int)]  # of all classes
    elif source:
        test = sources.load_split(source, "test", image_size)
    temperature, chosen = config.temperature, "as given"
    if source and (config.check or not temperature):
        test = run.number_labels(test, source.name, may_differ=bool(config.dataset))
    if source and not temperature:
        temperature, chosen = _fit_temperature(run, source, test, logits_of)
    scaling = f"logits divided by the temperature {temperature:.4g}, {chosen}" if temperature != 1 else ""
    if source and config.check:
        images, labels = test.images[: config.check], test.labels[: config.check]
        samples = _make_samples(images, image_size, lambda x: softmax(logits_of(x) / temperature))
    module = _make_module(run, model, temperature)
    own_layers = _own_layers(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_beside(path) as temporary, keras.saving.custom_object_scope(own_layers):
            file_format.write(module, temporary, **options)
            problem = _check(file_format, temporary, samples, labels, config.quantize) if samples else ""
            failed = (path.with_name(f"failed-{number}-{path.name}") for number in itertools.count(1))
            written = next(place for place in failed if not place.exists()) if problem else path
            if (written / "README.md").is_file():  # of the earlier export, perhaps the user's own
                shutil.copy(written / "README.md", temporary)
            files.replace(temporary, written)
    except DISK_ERRORS as error:
        reason = error_text(error) or type(error).__name__
        raise RunError(f"{path} cannot be written ({reason}); give another place by --out") from error
    except Exception as error:  # converters raise errors of all kinds
        traceback.print_exc()
        raise RunError(
            f"the model cannot be converted to format={config.format} ({error_line(error)}): the traceback above shows "
            "a bug, here or in the converter; another --format may work"
        ) from error
    origin = f"{run.directory} at step {run.metadata['step']}, {weights} weights"
    size = files.size_in_bytes(written) / 1e6
    print(f"{written}: {origin}, {size:.2f} MB{scaling and f', {scaling}'}{'' if samples else ', not checked'}")
    if problem:
        earlier = f"; {path} is the earlier export" if path.exists() else ""
        print(f"{written} {problem}: do not use it{earlier}", file=sys.stderr)
        if config.format == "keras" and own_layers:
            print("Keras needs get_config and **kwargs in layers of your own; saved_model does not", file=sys.stderr)
        return False
    suffix = Path(file_format.name).suffix
    card = (path.parent if suffix or not config.out else path) / "README.md"
    try:
        print(write_card(card, path, suffix, run, weights, f"# {scaling}\n" if scaling else ""))
    except (OSError, DataError, UsageError) as error:
        print(f"there is no new model card: {error_text(error)}", file=sys.stderr)
    return True


def load_portable_model(config: TrainedRunConfig) -> keras.Model:
    """Return the model of a checkpoint with its preprocessing: uint8 images [B, H, W, 3] -> probabilities [B, C].

    Raises:
      UsageError: there is no such run. DataError: the checkpoint is damaged.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    model = to_keras(_make_module(run, run.load(run.choose_weights(config.weights), "float32")))
    return keras.Model(model.inputs, model.output["probabilities"], name=model.name)


def _make_module(run: TrainedRun, model: keras.Model, temperature: float = 1.0) -> "ServingModule":
    model = to_stock_layers(model)
    if temperature != 1:
        model = keras.Model(model.input, model.output / temperature)
    return ServingModule(model, run.augmentation, run.info.image_size, run.info.class_names)


class ServingModule:
    """A model with its preprocessing and postprocessing: uint8 images -> probabilities and names.

    The preprocessing resizes the central square of an image to `image_size`, by operations that every format supports.

    Args:
      model: preprocessed images -> logits; of stock layers, in float32.
    """

    def __init__(self, model: keras.Model, augmentation: Augmentation, image_size: int, class_names: tuple[str, ...]):
        self.model, self.augmentation = model, augmentation
        self.image_size, self.class_names = image_size, class_names

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")], autograph=False)
    def serve(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return probabilities [B, C] float32, and as strings class_name [B] and class_names [C]."""
        with tf.name_scope(PREPROCESSING):
            inputs = self.augmentation.evaluate(resize_square(images, self.image_size))
        probabilities = tf.nn.softmax(self.model(inputs, training=False))
        names = tf.constant(self.class_names)
        class_name = tf.gather(names, tf.argmax(probabilities, 1))
        return {"probabilities": probabilities, "class_name": class_name, "class_names": names}


# What an export may replace -------------------------------------------------------------------------------------------


def _check_path(path: Path, name: str) -> None:
    """Raise unless `path` is free, or what is there is an earlier export. `name` is the usual one of the format."""
    if suffix := Path(name).suffix:
        if path.suffix != suffix:
            better = path / name if path.is_dir() else path.with_suffix(suffix)
            raise UsageError(f"--out={path} does not end in {suffix}; write --out={shlex.quote(str(better))}")
        may_replace = path.is_file()
    elif path.name in ("", ".."):
        raise UsageError(f"--out={path} may hold other files; write --out={shlex.quote(str(path / name))}")
    else:
        inside = {each.name for each in path.iterdir()} if path.is_dir() else set()
        may_replace = path.is_dir() and (not inside or tf.saved_model.SAVED_MODEL_FILENAME_PB in inside)
        if may_replace and (others := sorted(inside - SAVED_MODEL_FILES)):
            raise UsageError(f"{path} also holds {listed(others)}, which would be lost; move it, or give another --out")
    if path.exists() and not may_replace:
        raise UsageError(f"{path} exists and is no {name}; give another --out, or remove it")


# The check ------------------------------------------------------------------------------------------------------------


def _find_source(config: ExportConfig, run: TrainedRun) -> sources.Source:
    try:
        return sources.find(config.dataset or run.metadata["dataset"], config.data_dir)
    except DataError as error:
        use, without = "the export is checked on test images", "--check=0 skips the check"
        if config.quantize == "int8":
            use, without = "int8 is calibrated on training images", "--quantize=float16 --check=0 needs none"
        if not config.temperature:
            use, without = "the temperature is fitted on images", "give it as a number, as --temperature=1.5"
        raise DataError(f"{use}, and {error}; {without}") from None


def _fit_temperature(run: TrainedRun, source: sources.Source, test: Split, logits: RunFn) -> tuple[float, str]:
    """Return the temperature fitted on validation or else test images, and which; raise a RunError if there is none."""
    validation = run.own_split("validation", source)
    is_changed = not validation and test.digest != run.metadata.get("test_sha256")
    if is_changed and source.name == run.metadata["dataset"]:
        raise DataError(f"{source.name} has other test images than in training; restore them, or give --temperature=1")
    split, noun = (validation, "validation image") if validation else (test, "test image")
    images, temperature = count(len(split.labels), noun), fit_temperature(split.labels, logits(split.images))
    if not temperature:
        advice = "give a number, as --temperature=1.5"
        raise UsageError(f"no temperature can be fitted on {images}: {NO_TEMPERATURE}; {advice}")
    reason = "" if validation else f"{' of another data set' * is_changed}, as no validation images are at hand"
    return temperature, f"fitted on {images}{reason}"


def _make_samples(images: np.ndarray, image_size: int, probabilities: RunFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (images [n, H, W, 3] uint8, the checkpoint's probabilities) of the images and of `OTHER_SIZES`."""
    sizes = [(round(width * image_size), round(height * image_size)) for height, width in OTHER_SIZES]
    some = [Image.fromarray(image) for image in images[: max(2, NUM_RESIZED * 32**2 // image_size**2)]]
    resized = [np.stack([np.asarray(image.resize(size)) for image in some]) for size in sizes]
    inputs = [images, *(resize_square(tf.constant(each), image_size).numpy() for each in resized)]
    return list(zip([images, *resized], map(probabilities, inputs), strict=True))


def _own_layers(model: keras.Model) -> dict[str, type]:
    """Return the classes of layers that are not Keras's, by name. The `keras` format cannot be read without them."""
    classes = {type(layer) for layer in model._flatten_layers(include_self=False)}
    return {layer.__name__: layer for layer in classes if not layer.__module__.startswith("keras.")}


def _check(
    file_format: Format, path: Path, samples: Sequence[tuple[np.ndarray, np.ndarray]], labels: np.ndarray, quantize: str
) -> str:
    """Print how an export's probabilities differ from the expected ones; return the problem, or an empty string.

    The samples are pairs of images and expected probabilities, the first of them with these labels.
    """
    try:
        run = file_format.open(path)
        exported = [
            np.concatenate([run(images[start : start + BATCH_SIZE]) for start in range(0, len(images), BATCH_SIZE)])
            for images, _ in samples
        ]
    except Exception as error:  # interpreters raise errors of all kinds
        return f"cannot be run here ({error_line(error)})"
    measure, tolerance, cause = "largest difference of a probability", PROBABILITY_ATOL, "rounding"
    if quantize:
        measure, tolerance, cause = f"mean of each image's {measure}", MEAN_ATOL[quantize], quantize
    reduce: Callable[[np.ndarray], float] = np.mean if quantize else np.max
    by_image = [np.abs(ours - theirs).max(1) for ours, (_, theirs) in zip(exported, samples, strict=True)]
    differences = [float(reduce(of_images)) for of_images in by_image]
    accuracy, expected = (100 * float((p.argmax(1) == labels).mean()) for p in (exported[0], samples[0][1]))
    print(
        f"checked on {len(labels):,} test images: accuracy {accuracy:.2f} %, the checkpoint's {expected:.2f} %; "
        f"{measure} {differences[0]:.1e}, in other sizes {max(differences[1:]):.1e}"
    )
    if quantize and expected - accuracy > MAX_ACCURACY_LOSS:
        return f"loses more than the {MAX_ACCURACY_LOSS} percentage points of accuracy that {quantize} explains"
    if all(difference <= tolerance for difference in differences):  # false for NaN
        return ""
    return f"differs by more than the {tolerance:.0e} that {cause} explains"


# The formats ----------------------------------------------------------------------------------------------------------


def _write_saved_model(module: ServingModule, path: Path) -> None:
    def serve(images: tf.Tensor) -> dict[str, tf.Tensor]:
        outputs = module.serve(images)
        return {name: outputs[name] for name in ("probabilities", "class_name")}

    archive = keras.export.ExportArchive()
    archive.add_endpoint("serving_default", module.serve, module.serve.input_signature)
    archive.add_endpoint("serve", serve, module.serve.input_signature)  # TensorFlow Serving needs [B, ...] to batch
    for name in ("variables", "trainable_variables"):  # not by track(model), which would write them twice
        archive.add_variable_collection(name, [variable.value for variable in getattr(module.model, name)])
    archive.write_out(str(path), verbose=False)


def _open_saved_model(path: Path) -> RunFn:
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda images: serve(images=tf.constant(images))["probabilities"].numpy()


def to_keras(module: ServingModule) -> keras.Model:
    """Return the module as one Keras model of stock layers: uint8 images -> {probabilities, class_name}."""
    augmentation, image_size = module.augmentation, module.image_size
    images = keras.Input((None, None, 3), dtype="uint8", name="images")
    x = resize_square(images, image_size)
    if augmentation.crop:
        x = keras.layers.CenterCrop(augmentation.crop, augmentation.crop, dtype="float32", name="crop")(x)
        image_size = augmentation.crop
    if augmentation.standardize == "dataset":
        variance = np.square(augmentation.std)
        x = keras.layers.Normalization(mean=augmentation.mean, variance=variance, dtype="float32", name="normalize")(x)
    else:
        mean = keras.ops.mean(x, [1, 2, 3], keepdims=True)
        std = keras.ops.std(x, [1, 2, 3], keepdims=True)
        x = (x - mean) / keras.ops.maximum(std, (3 * image_size**2) ** -0.5)
    logits = module.model(x, training=False)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    to_name = keras.layers.StringLookup(
        vocabulary=list(module.class_names), num_oov_indices=0, invert=True, name="class_name"
    )
    class_name = to_name(keras.ops.top_k(probabilities, 1)[1][:, 0])  # argmax uses bits, which LiteRT cannot
    outputs = {"probabilities": probabilities, "class_name": class_name}
    return keras.Model(images, outputs, name="deployed")


def _open_keras(path: Path) -> RunFn:
    model = keras.models.load_model(path, compile=False)
    return lambda images: model(tf.constant(images))["probabilities"].numpy()


def _write_litert(module: ServingModule, path: Path, quantize: str = "", examples: Sequence[np.ndarray] = ()) -> None:
    """Write the module with float32, float16 or int8 weights; int8 activations are calibrated on `examples`."""
    with tempfile.TemporaryDirectory() as directory:  # the converter keeps the signature of saved models only
        _write_saved_model(module, Path(directory))
        converter = tf.lite.TFLiteConverter.from_saved_model(directory)
        if quantize == "int8":
            path.write_bytes(_convert_to_int8(converter, examples))
            return
        if quantize == "float16":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        path.write_bytes(converter.convert())


def _convert_to_int8(converter: tf.lite.TFLiteConverter, examples: Sequence[np.ndarray]) -> bytes:
    """Quantize weights and activations, except in the preprocessing, whose range depends on the size of the images."""
    from ai_edge_litert.interpreter import Interpreter

    tensors = Interpreter(model_content=converter.convert()).get_tensor_details()
    in_float32 = [tensor["name"] for tensor in tensors if tensor["name"].startswith(PREPROCESSING)]
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([image[None]] for image in examples)
    options = tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=in_float32)
    with warnings.catch_warnings(), messages_only_of_a_failure():
        warnings.simplefilter("ignore")  # of functions that TensorFlow calls itself
        debugger = tf.lite.experimental.QuantizationDebugger(converter=converter, debug_options=options)
        return debugger.get_nondebug_quantized_model()


def _open_litert(path: Path) -> RunFn:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    return lambda images: runner(images=images)["probabilities"]


def _write_onnx(module: ServingModule, path: Path) -> None:
    import tf2onnx

    def erfc(graph: Any, node: Any, name: str, _: Any) -> None:  # part of TensorFlow's GELU; ONNX has only Erf
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


def _open_onnx(path: Path) -> RunFn:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return lambda images: session.run(["probabilities"], {entry.name: images})[0]


FORMATS = {
    "saved_model": Format("saved_model", (), _write_saved_model, _open_saved_model),
    "keras": Format("model.keras", (), lambda module, path: to_keras(module).save(path), _open_keras),
    "litert": Format("model.tflite", ("ai_edge_litert",), _write_litert, _open_litert),
    "tflite": Format("model.tflite", ("ai_edge_litert",), _write_litert, _open_litert),
    "onnx": Format("model.onnx", ("tf2onnx", "onnxruntime"), _write_onnx, _open_onnx),
}
