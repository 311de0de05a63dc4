"""Model parallelism: one functional Keras model in stages, each on its own device.

`staged_call` replaces `model.stateless_call`. If it is called on several micro-batches in one
`tf.function`, the stages work as a pipeline: stage 1 is on micro-batch 0 while stage 0 is on
micro-batch 1. Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", arXiv 1811.06965.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from cifar_towers.errors import UsageError
from cifar_towers.towers.make_parallel import with_pinned_backward
from cifar_towers.towers.placement import HOST, custom_placement

# Multiply-adds that take as long as reading, changing and writing one element of a layer's output:
# 20 to 40 measured on a CPU in float32, about 200 by the peak rates of a GPU with matrix units.
ELEMENT_COST = 100

# One layer in a model, its symbolic inputs and its outputs, by name.
LayerCall: TypeAlias = tuple[
    keras.layers.Layer, dict[str, keras.KerasTensor], dict[str, keras.KerasTensor]
]


class Stage(NamedTuple):
    """Consecutive layers of a model, on one device."""

    device: str
    model: keras.Model  # inputs -> outputs; shares the whole model's layers
    inputs: tuple[str, ...]  # names of tensors: the images, or outputs of any earlier stage
    outputs: tuple[
        str, ...
    ]  # names of tensors that a later stage needs; the logits in the last stage


def cut_in_stages(
    model: keras.Model, devices: Sequence[str], *, open_size: int = 32
) -> list[Stage]:
    """Cut a model's layers, in the order they run, into one stage per device, so that the costliest
    stage costs least.

    The cost of a layer is an estimate: the elements of its kernels times the positions of its
    output, which are the multiply-adds of convolutions and dense layers, plus `ELEMENT_COST` for
    each element of its output; 0 where a shape is unknown. Transfers between devices count as free.
    A layer that is itself a model is not cut.

    Args:
      model: a graph of layers with one input and one output, which calls each layer once.
      devices: such as `["/GPU:0", "/GPU:1"]`, in the order of the stages; one device may have
        several stages.
      open_size: replaces sizes that the model leaves open (height and width of its images) when
        costs are estimated.

    Raises:
      ValueError: more devices than layers, or a layer that is called twice.
    """
    shape = model.inputs[0].shape[1:]
    calls = _layer_calls(model, shape)
    if len(devices) > len(calls):
        raise UsageError(
            f"{len(devices)} stages need at least {len(devices)} layers; {model.name} has "
            f"{len(calls)}"
        )
    if len({id(layer) for layer, _, _ in calls}) < len(calls):
        raise UsageError(f"{model.name} calls a layer twice; stages need layers of their own")
    costs = [
        _cost(layer, outputs)
        for layer, _, outputs in _layer_calls(model, [size or open_size for size in shape])
    ]
    starts = cheapest_cuts(costs, len(devices))
    bounds = list(zip(starts, [*starts[1:], len(calls)], strict=True))
    return [
        _stage(device, calls[begin:end], calls[end:])
        for device, (begin, end) in zip(devices, bounds, strict=True)
    ]


def staged_call(
    stages: Sequence[Stage], model: keras.Model
) -> Callable[[Any, Any, tf.Tensor], tuple[Any, ...]]:
    """Return `model.stateless_call` for training, with each stage's forward and backward pass on
    the stage's device.

    Operations are named `stage_0/...`, `stage_1/...`. They are ordered by data only, so that a
    stage need not wait for another micro-batch. Keras masks do not pass from stage to stage.

    Returns:
      (weights, non-trainable values, [B, ...] images) -> ([B, ...] logits, new non-trainable
      values), with lists of tensors in the order of `model.trainable_variables` and
      `model.non_trainable_variables`. A value that does not change is returned as the same tensor.
      Changed values carry no gradient.
    """
    kinds = model.trainable_variables, model.non_trainable_variables
    position = {
        id(variable): index for variables in kinds for index, variable in enumerate(variables)
    }
    weights_of = [[position[id(v)] for v in stage.model.trainable_variables] for stage in stages]
    non_trainable_of = [
        [position[id(v)] for v in stage.model.non_trainable_variables] for stage in stages
    ]

    def call(
        weights: Sequence[tf.Tensor], non_trainable: Sequence[tf.Tensor], images: tf.Tensor
    ) -> tuple[Any, ...]:
        tensors, non_trainable = {stages[0].inputs[0]: images}, list(non_trainable)
        for index, stage in enumerate(stages):
            forward = with_pinned_backward(
                stage.device, f"stage_{index}", functools.partial(_forward, stage)
            )
            with tf.device(
                stage.device
            ):  # for the copies that `with_pinned_backward` makes of inputs and outputs
                outputs, changed = forward(
                    [weights[i] for i in weights_of[index]],
                    [non_trainable[i] for i in non_trainable_of[index]],
                    [tensors[name] for name in stage.inputs],
                )
            tensors |= dict(zip(stage.outputs, outputs, strict=True))
            for i, value in changed.items():
                non_trainable[non_trainable_of[index][i]] = value
        return tensors[stages[-1].outputs[0]], non_trainable

    return call


@contextlib.contextmanager
def stage_placement(
    build: Callable[[], keras.Model], devices: Sequence[str], *, open_size: int = 32
) -> Iterator[None]:
    """Create variables on the devices of their stages, while the model of `build` is built inside.

    Stages can only be cut from a model that has its variables. Therefore `build` is called once
    before, to learn the cut and the order in which variables are created. Slots are beside their
    variable, all else is in host memory.
    """
    created: list[tf.Variable] = []

    def record(next_creator: Callable[..., tf.Variable], **creation: Any) -> tf.Variable:
        created.append(next_creator(**creation))
        return created[-1]

    with tf.variable_creator_scope(record):
        model = build()
    stages = cut_in_stages(model, devices, open_size=open_size)
    device_of = {
        id(variable.value): stage.device for stage in stages for variable in stage.model.variables
    }
    order = iter([device_of.get(id(variable), HOST) for variable in created])
    with custom_placement(lambda bytes_on: next(order, HOST)):
        yield


def cheapest_cuts(costs: Sequence[int], stages: int) -> list[int]:
    """Cut costs into `stages` consecutive runs whose largest sum is minimal; return each run's
    first index.

    The result is exact, by dynamic programming over (layers, stages) in stages * layers^2 steps.

    >>> cheapest_cuts([3, 1, 1, 1, 4], 3)
    [0, 1, 4]
    """
    before = list(accumulate(costs, initial=0))

    @functools.cache
    def best(end: int, runs: int) -> tuple[int, tuple[int, ...]]:
        """Return the smallest largest sum, and the starts, of the first `end` costs in so many
        runs.
        """
        if runs == 1:
            return before[end], (0,)
        cuts = ((start, best(start, runs - 1)) for start in range(runs - 1, end))
        return min(
            (max(largest, before[end] - before[start]), (*starts, start))
            for start, (largest, starts) in cuts
        )

    return list(best(len(costs), stages)[1])


def _layer_calls(model: keras.Model, shape: Sequence[int | None]) -> list[LayerCall]:
    """Return the calls of the model's layers in the order they run, on new tensors for examples of
    `shape`.
    """
    functional = keras.Model(model.inputs, model.outputs)  # which a `Sequential` is not
    images = keras.Input(tuple(shape), dtype=functional.inputs[0].dtype)
    names = {id(images): "images"}
    calls: list[LayerCall] = []

    def record(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        result = layer(*args, **kwargs)
        outputs = {
            f"{layer.name}:{i}": tensor for i, tensor in enumerate(keras.tree.flatten(result))
        }
        names.update((id(tensor), name) for name, tensor in outputs.items())
        inputs = [
            tensor
            for tensor in keras.tree.flatten((args, kwargs))
            if isinstance(tensor, keras.KerasTensor)
        ]
        calls.append((layer, {names[id(tensor)]: tensor for tensor in inputs}, outputs))
        return result

    keras.models.clone_model(
        functional, [images], clone_function=lambda layer: layer, call_function=record
    )
    return calls


def _cost(layer: keras.layers.Layer, outputs: Mapping[str, keras.KerasTensor]) -> int:
    """Estimate the cost of a layer in multiply-adds."""
    kernels = sum(
        math.prod(weight.shape) for weight in getattr(layer, "weights", ()) if len(weight.shape) > 1
    )
    shapes = [[size or 0 for size in tensor.shape[1:]] for tensor in outputs.values()]
    return kernels * max(math.prod(shape[:-1]) for shape in shapes) + ELEMENT_COST * sum(
        map(math.prod, shapes)
    )


def _stage(device: str, calls: Sequence[LayerCall], later: Sequence[LayerCall]) -> Stage:
    """Return the stage of `calls`. Its inputs are what it does not compute, its outputs what
    `later` calls need.
    """
    computed = {name: tensor for _, _, outputs in calls for name, tensor in outputs.items()}
    inputs = {
        name: tensor
        for _, used, _ in calls
        for name, tensor in used.items()
        if name not in computed
    }
    needed = {name for _, used, _ in later for name in used} if later else set(calls[-1][2])
    outputs = {name: tensor for name, tensor in computed.items() if name in needed}
    return Stage(
        device,
        keras.Model(list(inputs.values()), list(outputs.values())),
        tuple(inputs),
        tuple(outputs),
    )


def _forward(
    stage: Stage, weights: list[tf.Tensor], non_trainable: list[tf.Tensor], inputs: list[tf.Tensor]
) -> tuple[list[tf.Tensor], dict[int, tf.Tensor]]:
    """Return the outputs of one stage, and its new non-trainable values by position, if changed."""
    tensors, new_values = stage.model.stateless_call(weights, non_trainable, inputs, training=True)
    pairs = enumerate(zip(new_values, non_trainable, strict=True))
    # the backward pass gets zeros for values that no loss uses; without stop_gradient it would
    # compute with them
    changed = {index: tf.stop_gradient(new) for index, (new, old) in pairs if new is not old}
    return keras.tree.flatten(tensors), changed
