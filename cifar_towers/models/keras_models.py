"""Questions about a Keras model: values, names in checkpoints, calls of its layers."""

import itertools
from typing import Any

import keras
import tensorflow as tf


def variable_values(model: keras.Model) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the values of the trainable and of the non-trainable variables."""
    weights = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    non_trainable = [tf.convert_to_tensor(v.value) for v in model.non_trainable_variables]
    return weights, non_trainable


def checkpoint_key(variable: keras.Variable) -> str:
    """Return the name of a model's variable in checkpoints, without a prefix."""
    return variable.path.replace("/", ".")


def finish_restoring(model: keras.Model) -> None:
    """Let layers compute what they derive from their variables, as Keras does after it has loaded
    weights. An adapted `Normalization` does.
    """
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def first_call(model: keras.Model, layer: keras.layers.Layer) -> Any:
    """Return the first call of a layer in the graph of a functional model, with its `input_tensors`
    and `output_tensors`. `layer.output` may belong to a call in another model, such as a backbone.
    """
    calls = itertools.chain.from_iterable(model._nodes_by_depth.values())
    ids = {id(call) for call in calls}
    return next(call for call in layer._inbound_nodes if id(call) in ids)
