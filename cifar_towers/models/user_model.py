"""A net of the user's own: found, made, and held against what towers ask of one before anything is trained.

Towers call a net several times a step, each with weights, statistics and seeds handed in, and take what it returns. So
a layer may keep nothing else: no `tf.Variable` that it changes itself, no random numbers but of a seed of its own.
"""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from tensorflow.python.framework import op_def_registry

from cifar_towers.towers.keras_parallel import overridden_step

SEED = "seed_generator_state"  # what Keras calls the variable of a `keras.random.SeedGenerator`
SEEDED = "for random numbers give it a keras.random.SeedGenerator"
CALLS = ("call_0", "call_1")  # the name scopes that a net is traced in
PASSED_ON = ("Identity", "Cast", "Reshape", "Squeeze")  # operations that leave probabilities what they are


class ModelError(ValueError):
    """What is wrong with a user's net, in one line."""


def find(where: str, function: str) -> Callable[..., keras.Model]:
    """The function of this name in a file or an importable module.

    Raises:
      ModelError: there is none, or its file cannot be run.
    """
    try:
        if where.endswith(".py"):
            path = Path(where).expanduser()
            if not path.is_file():
                raise ModelError(f"there is no file {path}")
            spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            with _on_path(str(path.parent)):
                spec.loader.exec_module(module)
        else:
            with _on_path(""):
                module = importlib.import_module(where)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{where} cannot be imported: {_told(error)}") from error
    made = getattr(module, function, None)
    if not callable(made):
        named = ", ".join(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise ModelError(f"{where} has no function {function}; it has {named or 'none at all'}")
    return made


@contextlib.contextmanager
def _on_path(directory: str) -> Iterator[None]:
    """Imports look into `directory` first, as Python's own do for the program it runs."""
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def make(function: Callable[..., keras.Model], side: int, num_classes: int, policy: str) -> keras.Model:
    """What `function` returns, built for [B, side, side, 3] and checked.

    `side`, `num_classes` and `dtype` are handed to it as far as it takes arguments of these names.

    Raises:
      ModelError: it fails, or returns what towers cannot train; see `check`.
    """
    offered = {"side": side, "num_classes": num_classes, "dtype": policy}
    try:
        taken = inspect.signature(function).parameters
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = function(**{name: value for name, value in offered.items() if name in taken})
            if not isinstance(model, keras.Model):
                raise ModelError(f"it returns {type(model).__name__}, not a Keras model")
            step = overridden_step(model)
            if step:
                raise ModelError(f"it has a {step} of its own, which towers would not run; leave it out")
            if not isinstance(model, Functional):
                images = keras.Input((side, side, 3))
                logits = model(images)
                if type(model) is keras.Sequential:  # is a graph inside; a subclassed model becomes one of one layer
                    images, logits = model.inputs[0], model.outputs[0]
                model = keras.Model(images, logits, name=model.name)
        finally:
            keras.config.set_dtype_policy(before)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"it cannot be made: {_told(error)}") from error
    check(model, side, num_classes)
    return model


def check(model: keras.Model, side: int, num_classes: int) -> None:
    """Holds a net against what towers need.

    Raises:
      ModelError: naming the layer where there is one: other input or output shapes, probabilities instead of logits,
        random numbers without a seed or drawn when the net is traced, variables that are changed behind Keras's back,
        no weights to train, or variables of one name.
    """
    if not model.trainable_variables:
        raise ModelError("it has no weights to train")
    paths = [variable.path for variable in model.variables]
    twice = next((path for path in paths if paths.count(path) > 1), "")
    if twice:
        raise ModelError(f"two of its variables are called {twice}; give the layers names of their own")
    graph, output = _trace(model, side)
    _check_calls(graph, model)
    _check_output(output, model, num_classes)


def _check_calls(graph, model: keras.Model) -> None:
    for scope, kind, captures in _operations(graph):
        if kind.startswith("Assign"):
            raise ModelError(
                f"{_layer_of(scope, model)} changes a variable of its own when it is called, which K towers would do K "
                "times; keep it with add_weight(trainable=False) and assign it in call"
            )
        if captures or _is_random(kind):
            raise ModelError(
                f"{_layer_of(scope, model)} keeps something beside its weights, or draws random numbers without a seed "
                f"of its own; {SEEDED}"
            )
    first, second = (_constants(graph, call) for call in CALLS)
    for scope, value in first.items():
        if second.get(scope, value) != value:
            raise ModelError(
                f"{_layer_of(scope, model)} has other constants in another call: what NumPy or Python draw there is "
                f"the same at every step; {SEEDED}"
            )


def _check_output(output: tf.Tensor, model: keras.Model, num_classes: int) -> None:
    if output.shape.rank != 2 or output.shape[1] != num_classes:
        layer = _layer_of(_made_by(output, ("Identity",)).name, model)
        raise ModelError(
            f"{layer} gives an output of shape {output.shape[1:]} an image; {num_classes} classes want ({num_classes},)"
        )
    last = _made_by(output, PASSED_ON)
    if last.type in ("Softmax", "Sigmoid"):
        raise ModelError(
            f"{_layer_of(last.name, model)} ends in {last.type.lower()}, and the loss takes logits; give it "
            "activation=None"
        )


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.path.rpartition("/")[2] == SEED


def adds_losses(model: keras.Model, side: int) -> bool:
    """Whether a call of the net in training gives losses of its own: its regularizers', or what its layers add."""
    found = []

    def call(images):
        variables = ([v.value for v in kind] for kind in (model.trainable_variables, model.non_trainable_variables))
        found.extend(model.stateless_call(*variables, images, training=True, return_losses=True)[2])

    tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec([4, side, side, 3]))
    return bool(found)


def graph_node(model: Functional, layer: keras.layers.Layer):
    """The first call of a layer in a model's graph: `input_tensors` and `output_tensors`. `layer.output` is of its
    first call anywhere, as in the graph of a backbone whose layers the model calls again."""
    ours = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    return next(node for node in layer._inbound_nodes if id(node) in ours)


def _trace(model: keras.Model, side: int):
    """The graph of two calls in training, as two towers would make them, and the first one's output."""

    @tf.function(autograph=False)
    def calls(weights, statistics, images):
        outputs = []
        for call in CALLS:
            with tf.name_scope(call):
                outputs.append(model.stateless_call(weights, statistics, images, training=True)[0])
        return outputs

    specs = [
        [tf.TensorSpec(v.shape, v.dtype) for v in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    ]
    try:
        graph = calls.get_concrete_function(*specs, tf.TensorSpec([4, side, side, 3])).graph
    except Exception as error:
        raise ModelError(f"two towers cannot call it on {side}x{side} images: {_told(error)}") from error
    outputs = graph.structured_outputs
    if not isinstance(outputs[0], tf.Tensor):
        raise ModelError(f"it returns {type(outputs[0]).__name__}, and one tensor of logits is wanted")
    return graph, outputs[0]


def _operations(graph) -> Iterator[tuple[str, str, bool]]:
    """(name, type, whether it reads a variable that was not handed in) of each operation, those of functions within
    included."""
    captured = {internal.op.name for _, internal in graph.captures if internal.dtype == tf.resource}
    definition = graph.as_graph_def()
    for node in definition.node:
        yield node.name, node.op, any(name.partition(":")[0] in captured for name in node.input)
    for function in definition.library.function:
        for node in function.node_def:
            yield node.name, node.op, False


def _constants(graph, call: str) -> dict[str, bytes]:
    """Name within the call -> value of its constants."""
    nodes = (node for node in graph.as_graph_def().node if node.op == "Const" and node.name.startswith(f"{call}/"))
    return {node.name.removeprefix(call): node.attr["value"].SerializeToString() for node in nodes}


def _made_by(tensor: tf.Tensor, passed_on: Sequence[str]) -> tf.Operation:
    """The operation a tensor is from, before those of the types `passed_on`."""
    last = tensor.op
    while last.type in passed_on:
        last = last.inputs[0].op
    return last


def _is_random(kind: str) -> bool:
    """Whether operations of this type draw random numbers from a state of TensorFlow's."""
    definition = op_def_registry.get(kind)
    names = ("Random", "Truncated", "Multinomial", "ParameterizedTruncatedNormal", "Rng")
    names += ("StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")
    return bool(definition and definition.is_stateful and kind.startswith(names))


def _layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """All layers, those within layers included."""
    yield from model._flatten_layers(include_self=False)


def _layer_of(scope: str, model: keras.Model) -> str:
    """The innermost layer that an operation's name tells of."""
    names = {layer.name for layer in _layers(model)}
    counted = (re.sub(r"_\d+$", "", part) for part in scope.split("/"))  # Keras opens a layer's scope twice a call
    found = [part for part in counted if part in names]
    return f"layer {found[-1]}" if found else "the net"


def _told(error: Exception) -> str:
    """An error in one line: where in the user's code it came from, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("<", __file__, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Keras writes in bold
    return f"{where}{type(error).__name__}: {' '.join(said.split())[:200]}"
