"""What is asked of a Keras model."""

from typing import Any

import keras
import tensorflow as tf


def variable_values(model: keras.Model) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the values of the trainable and of the non-trainable variables."""
    kinds = model.trainable_variables, model.non_trainable_variables
    weights, non_trainable = (
        [tf.convert_to_tensor(variable.value) for variable in kind] for kind in kinds
    )
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
    calls = {id(node) for at_depth in model._nodes_by_depth.values() for node in at_depth}
    return next(node for node in layer._inbound_nodes if id(node) in calls)
