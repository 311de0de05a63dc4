"""A model of the user's own: build it, and check that towers can train it.

Towers call a model several times a step, each time with weights, non-trainable values and seeds passed in. A layer must
not have other state: no `tf.Variable` besides its weights, no random numbers without a `keras.random.SeedGenerator`.
"""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from cifar_towers.errors import UsageError
from cifar_towers.models.layers import BATCH_NORMS
from cifar_towers.towers.keras_parallel import (
    check_split,
    first_call,
    nearly_equal,
    overridden_fit_method,
    to_scalar,
    variable_values,
)
from cifar_towers.user_code import as_usage_errors, log_once

SEEDED = "for random numbers use a keras.random.SeedGenerator"
NUM_IMAGES = 3  # in the batch that a model is checked with
ROUNDING = 1e-3  # smaller differences between two calls, relative to the largest output, are not random numbers
PASS_THROUGH = ("Identity", "Cast", "Reshape", "Squeeze")  # operations that may follow the softmax


def build_model(
    function: Callable[..., keras.Model], image_size: int, num_classes: int, policy: str, to_train: bool = True
) -> keras.Model:
    """Build the model that `function` returns for [B, image_size, image_size, 3], and check it if it is `to_train`.

    Arguments of `function` that are called `image_size`, `num_classes` or `dtype` get their values.

    Raises:
      UsageError: the function fails, or its model has other input or output shapes, integer inputs, probabilities
        instead of logits, no weights to train, 16-bit weights, or two variables of a name. Towers also cannot train a
        model with variables that are not weights, whose layers write weights or mix images, or random numbers without
        a seed. The message names the layer, if there is one.
    """
    arguments = {"image_size": image_size, "num_classes": num_classes, "dtype": policy}
    with as_usage_errors("the model cannot be built"), contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        keras.config.set_dtype_policy(policy)
        parameters = inspect.signature(function).parameters
        model = function(**{name: value for name, value in arguments.items() if name in parameters})
        if not isinstance(model, keras.Model):
            raise UsageError(f"it returns {type(model).__name__}, not a Keras model")
        method = overridden_fit_method(model)
        if method and to_train:
            raise UsageError(f"it overrides {method}, which towers would not run; leave it out")
        model = _as_functional(model, image_size)
    if to_train:
        _check_model(model, image_size, num_classes)
    return model


def _check_model(model: keras.Model, image_size: int, num_classes: int) -> None:
    if not model.trainable_variables:
        raise UsageError("it has no weights to train")
    paths = [variable.path for variable in model.variables]
    duplicate = next((path for path in paths if paths.count(path) > 1), "")
    if duplicate:
        raise UsageError(f"two of its variables are called {duplicate}; give the layers different names")
    narrow = next((v for v in model.trainable_variables if tf.as_dtype(v.dtype).size < 4), None)
    if narrow is not None:
        raise UsageError(
            f"{narrow.path} is {narrow.dtype}, in which updates are lost to rounding; leave out the layer's dtype, as "
            "--precision chooses what layers compute in"
        )
    integer = next((images for images in model.inputs if not tf.as_dtype(images.dtype).is_floating), None)
    if integer is not None:
        raise UsageError(f"its keras.Input is {integer.dtype}, and images come normalized, as floats; leave out dtype=")
    layers = [layer for layer in model._flatten_layers(include_self=False) if not isinstance(layer, keras.Model)]
    of_input = itertools.takewhile(lambda layer: not layer.trainable_variables, layers)
    rescaling = (keras.layers.Rescaling, keras.layers.Normalization)
    if names := [layer.name for layer in of_input if isinstance(layer, rescaling)]:
        log_once(
            f"images come normalized, not as levels from 0 to 255, and {', '.join(names)} would normalize them again: "
            "leave that out, as by include_preprocessing=False where a net has it"
        )
    with as_usage_errors(f"two towers cannot call it on {image_size}x{image_size} images"):
        output = _trace(model, image_size)
        _check_repeatable(model, image_size)
    _check_output(output, model, num_classes)


def adds_losses(model: keras.Model, image_size: int) -> bool:
    """Return whether a call in training adds losses, by regularizers or by `add_loss`."""
    return bool(_effects(model, image_size)[0])


def own_statistics(model: keras.Model, image_size: int) -> list[str]:
    """Return the paths of float variables that a call in training changes, without those of batch norm."""
    norms = [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, BATCH_NORMS)]
    known = {id(variable) for norm in norms for variable in norm.variables}
    if not any("float" in v.dtype and id(v) not in known for v in model.non_trainable_variables):
        return []
    changed = _effects(model, image_size)[1]
    return [variable.path for variable in changed if "float" in variable.dtype and id(variable) not in known]


def _effects(model: keras.Model, image_size: int) -> tuple[list[tf.Tensor], list[keras.Variable]]:
    """Return the losses that a call in training adds, and the variables that it changes."""
    effects: tuple[list[tf.Tensor], list[keras.Variable]] = ([], [])

    def call(images: tf.Tensor) -> None:
        weights, state = variable_values(model)
        _, new_state, losses = model.stateless_call(weights, state, images, training=True, return_losses=True)
        effects[0].extend(losses)
        values = zip(model.non_trainable_variables, new_state, state, strict=True)
        effects[1].extend(variable for variable, new, old in values if new is not old)

    tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec([NUM_IMAGES, image_size, image_size, 3]))
    return effects


def _as_functional(model: keras.Model, image_size: int) -> Functional:
    """Return a model as a graph: of its layers, or of a single layer for a model with a `call` of its own."""
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    images = keras.Input((image_size, image_size, 3))
    logits = model(images)
    if type(model) is keras.Sequential:
        images, logits = model.inputs[0], model.outputs[0]
    return keras.Model(images, logits, name=model.name)


def _trace(model: keras.Model, image_size: int) -> Any:
    """Return the output of a traced training call. Log weights without a gradient; raise if it uses other variables."""

    @tf.function(autograph=False)
    def call(weights: list[tf.Tensor], non_trainable: list[tf.Tensor], images: tf.Tensor) -> tf.Tensor:
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        values = zip(variables, [*weights, *non_trainable], strict=True)
        with tf.GradientTape() as tape, keras.StatelessScope(values, collect_losses=True) as scope:
            tape.watch(weights)
            logits = model(images, training=True)
            losses = model.losses
        gradients = tape.gradient([*tf.nest.flatten(logits), *losses], weights)
        if untrained := [v.path for v, g in zip(model.trainable_variables, gradients, strict=True) if g is None]:
            log_once(f"not trained, as they have no gradient: {', '.join(untrained)}")
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            if scope.get_current_value(variable) is not value:
                raise UsageError(f"{variable.path} is trainable and also written by its layer, which is not kept")
        return logits

    specs = tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), variable_values(model))
    graph = call.get_concrete_function(*specs, tf.TensorSpec([NUM_IMAGES, image_size, image_size, 3])).graph
    if operation := first_use_of_resource(graph):
        raise UsageError(
            f"{_layer_of(operation.name, model)} uses a variable that is not a weight of the model, "
            f"and towers would share it; create it with add_weight(trainable=False); {SEEDED}"
        )
    return graph.structured_outputs


def first_use_of_resource(graph: tf.Graph) -> tf.Operation | None:
    """Return an operation of a traced function that uses a variable, or another resource, from outside; or None."""
    resources = [captured for _, captured in graph.captures if captured.dtype == tf.resource]
    return next((operation for resource in resources for operation in resource.consumers()), None)


def _check_repeatable(model: keras.Model, image_size: int) -> None:
    """Raise if a layer's outputs differ between two calls with equal images, weights and seeds, or mix images."""
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    outputs = [first_call(model, layer).output_tensors for layer in layers]
    probe = keras.Model(model.inputs, outputs, name="probe")
    random = np.random.default_rng(0)
    weights, non_trainable = variable_values(probe)
    # initial weights may be zeros, which would hide what a layer inside a layer draws
    weights = [weight + tf.cast(random.normal(0, 0.1, weight.shape), weight.dtype) for weight in weights]
    scales = np.reshape([1, 2, 4], (NUM_IMAGES, 1, 1, 1))
    images = tf.constant(random.normal(1, scales, (NUM_IMAGES, image_size, image_size, 3)), tf.float32)
    calls = [probe.stateless_call(weights, non_trainable, images, training=True, return_losses=True) for _ in range(2)]
    (first, _, in_training), (second, _, _) = calls
    for layer, *outputs in zip(layers, first, second, strict=True):
        pairs = zip(*map(tf.nest.flatten, outputs), strict=True)
        if not all(nearly_equal(a, b, ROUNDING) for a, b in pairs):
            raise UsageError(
                f"layer {layer.name} returns other values in a second call with the same input, weights and seeds: it "
                f"draws random numbers without a seed; {SEEDED}"
            )

    def infer(images: tf.Tensor) -> list[tf.Tensor]:
        outputs, _, losses = probe.stateless_call(weights, non_trainable, images, training=False, return_losses=True)
        if len(losses) < len(in_training):
            log_once("a layer adds a loss in training only, so it is not checked: make it a mean over the images")
        return tf.nest.flatten(outputs) + [to_scalar(loss) for loss in losses]

    names = [
        f"layer {layer.name}" for layer, output in zip(layers, first, strict=True) for _ in tf.nest.flatten(output)
    ]
    check_split(infer, images, names)


def _check_output(output: Any, model: keras.Model, num_classes: int) -> None:
    if not isinstance(output, tf.Tensor):
        raise UsageError(f"it returns {type(output).__name__}, not one tensor of logits")
    if output.shape.rank != 2 or output.shape[1] != num_classes:
        layer = _layer_of(_source_op(output, ("Identity",)).name, model)
        raise UsageError(
            f"{layer} has an output of shape {output.shape[1:]} per image; {num_classes} classes need ({num_classes},)"
        )
    last = _source_op(output, PASS_THROUGH)
    if last.type in ("Softmax", "Sigmoid"):
        raise UsageError(
            f"{_layer_of(last.name, model)} ends in {last.type.lower()}, and the loss takes logits; set activation=None"
        )


def _source_op(tensor: tf.Tensor, skipped: Sequence[str]) -> tf.Operation:
    """Return the operation that computes a tensor, looking through operations of the types `skipped`."""
    op = tensor.op
    while op.type in skipped:
        op = op.inputs[0].op
    return op


def _layer_of(op_name: str, model: keras.Model) -> str:
    """Return the innermost layer in the name of an operation."""
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    scopes = [re.sub(r"_\d+$", "", scope) for scope in op_name.split("/")]  # Keras may open a scope twice a call
    layers = [scope for scope in scopes if scope in names]
    return f"layer {layers[-1]}" if layers else "the model"
