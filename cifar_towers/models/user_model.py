"""A model of the user's: build it, and check that towers can train it.

Towers call a model several times a step, each time with weights, non-trainable values and seeds
passed in. A layer must not have other state: no `tf.Variable` besides its weights, no random
numbers without a `keras.random.SeedGenerator`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from cifar_towers.errors import UsageError
from cifar_towers.models.keras_models import checkpoint_key, variable_values
from cifar_towers.models.layers import BATCH_NORMS
from cifar_towers.towers.keras_parallel import overridden_fit_method, synchronized_norm

NUM_IMAGES = 4  # in the batch that a model is checked with
SUM_TOLERANCE = 0.01  # of an image's probabilities, which may be bfloat16
MIXING_TOLERANCE = 0.05  # of the largest output, which may be bfloat16
WEIGHT_NOISE = 0.01  # standard deviation


def build_model(
    function: Callable[..., keras.Model], image_size: int, num_classes: int, policy: str
) -> Functional:
    """Build the model that `function` returns for [B, image_size, image_size, 3].

    Arguments of `function` that are called `image_size`, `num_classes` or `dtype` get their values.

    Raises:
      UsageError: the model overrides what `fit` calls, or has variables that the function has not
        just made: they would keep what an earlier run trained.
    """
    created: list[tf.Variable] = []

    def record(next_creator: Callable[..., tf.Variable], **creation: Any) -> tf.Variable:
        created.append(next_creator(**creation))
        return created[-1]

    parameters = inspect.signature(function).parameters
    known = {"image_size": image_size, "num_classes": num_classes, "dtype": policy}
    arguments = {name: value for name, value in known.items() if name in parameters}

    policy_before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with tf.variable_creator_scope(record):
            model = function(**arguments)
            functional = _as_functional(model, image_size)
    finally:
        keras.config.set_dtype_policy(policy_before)

    method = overridden_fit_method(model)
    if method:
        raise UsageError(f"--model overrides {method}, which towers would not run; leave it out")
    new = {id(variable) for variable in created}
    old = [variable.path for variable in functional.variables if id(variable.value) not in new]
    if old:
        raise UsageError(f"--model must make a new net in each call; {old[0]} existed before it")
    return functional


def check_model(
    model: Functional, image_size: int, num_classes: int, synchronized: bool = False
) -> None:
    """Raise UsageError if towers would train something else than the model says.

    Args:
      synchronized: whether batch norms compute their moments over all towers.
    """
    if model.output_shape != (None, num_classes):
        raise UsageError(
            f"--model has the output shape {model.output_shape}, not (None, {num_classes}) of "
            "logits"
        )
    if not tf.as_dtype(model.inputs[0].dtype).is_floating:
        raise UsageError(
            "--model takes integers, and images come normalized, as floats; leave out the Input's "
            "dtype"
        )
    _check_variables(model)
    norm = synchronized_norm(model)
    if norm and not synchronized:
        raise UsageError(
            f"--model has the synchronized layer {norm}; add --batch_statistics=synchronized"
        )

    changed = _trace_training(model, image_size)
    of_norms: set[int] = set()
    for layer in model._flatten_layers():
        if isinstance(layer, BATCH_NORMS):
            of_norms.update(id(v) for v in layer.variables)
    statistics = [v.path for v in changed if "float" in v.dtype and id(v) not in of_norms]
    if synchronized and statistics:
        raise UsageError(
            f"--batch_statistics=synchronized cannot synchronize {statistics[0]}, which is not in "
            "a BatchNormalization; leave it out"
        )
    _check_outputs(model, image_size)


def _check_variables(model: Functional) -> None:
    """Raise UsageError if checkpoints or towers would not keep a variable as the model does."""
    keys = [checkpoint_key(variable) for variable in model.variables]
    duplicates = [key for key in keys if keys.count(key) > 1]
    if duplicates:
        raise UsageError(
            f"--model has two variables called {duplicates[0]}; give the layers different names"
        )
    narrow = [v.path for v in model.variables if _is_narrow(tf.as_dtype(v.dtype))]
    if narrow:
        raise UsageError(f"--model stores {narrow[0]} in 16 bits; leave out the layer's dtype")
    constrained = [v.path for v in model.trainable_variables if v.constraint]
    if constrained:
        raise UsageError(f"--model has a constraint on {constrained[0]}; leave it out")


def _is_narrow(dtype: tf.DType) -> bool:
    return dtype.is_floating and dtype.size < tf.float32.size


def _check_outputs(model: Functional, image_size: int) -> None:
    """Raise UsageError if a model returns probabilities, or if its output for an image in an
    evaluation depends on the other images.
    """
    random = np.random.default_rng(0)
    images = random.normal(size=(NUM_IMAGES, image_size, image_size, 3)).astype("f4")
    weights, non_trainable = variable_values(model)
    # zeros, as of a last layer, would hide what is before them
    noise = [random.normal(size=w.shape, scale=WEIGHT_NOISE).astype("f4") for w in weights]
    weights = [weight + tf.cast(n, weight.dtype) for weight, n in zip(weights, noise, strict=True)]

    def evaluate(images: np.ndarray) -> np.ndarray:
        outputs, _ = model.stateless_call(weights, non_trainable, images, training=False)
        return np.asarray(tf.cast(outputs, tf.float32))

    together = evaluate(images)
    sums_to_one = np.abs(together.sum(1) - 1).max() < SUM_TOLERANCE
    if sums_to_one and together.min() >= 0 and together.max() <= 1:
        raise UsageError(
            "--model returns probabilities, and the loss takes logits; leave out its softmax"
        )

    apart = np.concatenate([evaluate(image[None]) for image in images])
    if np.abs(together - apart).max() > MIXING_TOLERANCE * np.abs(apart).max():
        raise UsageError(
            "--model predicts something else for an image in an evaluation when the rest of the "
            "batch changes; with training=False, its layers must use moving averages"
        )


def _trace_training(model: Functional, image_size: int) -> list[keras.Variable]:
    """Return the variables that a training call changes.

    Raises:
      UsageError: a weight has no gradient, a call changes a weight, or it uses a variable that the
        model does not have.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    effects: list[list] = []

    @tf.function(autograph=False)
    def call(weights: list[tf.Tensor], non_trainable: list[tf.Tensor], images: tf.Tensor) -> None:
        values = list(zip(variables, [*weights, *non_trainable], strict=True))
        with tf.GradientTape() as tape, keras.StatelessScope(values, collect_losses=True) as scope:
            tape.watch(weights)
            logits = model(images, training=True)
            losses = model.losses
        gradients = tape.gradient([logits, *losses], weights)
        changed = [v for v, value in values if scope.get_current_value(v) is not value]
        effects.extend((gradients, changed))

    specs = tf.nest.map_structure(
        lambda value: tf.TensorSpec(value.shape, value.dtype), variable_values(model)
    )
    images = tf.TensorSpec([NUM_IMAGES, image_size, image_size, 3])
    graph = call.get_concrete_function(*specs, images).graph
    gradients, changed = effects

    for _, value in graph.captures:
        if value.dtype == tf.resource and value.consumers():
            raise UsageError(
                "--model uses a variable that is not a weight, and towers would share it: see "
                f"{value.consumers()[0].name}"
            )
    lost = [variable.path for variable in changed if variable.trainable]
    if lost:
        raise UsageError(
            f"--model changes the trainable {lost[0]} in its call, which would be lost; set "
            "trainable=False, or leave the change out"
        )
    weights = zip(model.trainable_variables, gradients, strict=True)
    untrained = [weight.path for weight, gradient in weights if gradient is None]
    if untrained:
        raise UsageError(
            f"--model has weights without a gradient: {', '.join(untrained)}; set trainable=False"
        )
    return changed


def _as_functional(model: keras.Model, image_size: int) -> Functional:
    """Return a model as a graph: of its layers, or of a single layer for a model with a `call` of
    its own.
    """
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    images = keras.Input((image_size, image_size, 3))
    logits = model(images)
    if type(model) is keras.Sequential:
        images = model.inputs[0]
        logits = model.outputs[0]
    return keras.Model(images, logits, name=model.name)
