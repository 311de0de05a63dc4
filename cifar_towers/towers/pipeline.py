"""Model parallelism: one functional Keras model in stages, each on a device of its own.

`staged_call` stands in for `model.stateless_call`. Give it several parts of a batch in one `tf.function` and the
stages work as a pipeline: stage 1 on part 0 while stage 0 is on part 1.
Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
arXiv 1811.06965.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar_towers.towers.placement import HOST, custom_placement
from cifar_towers.towers.sharding import with_pinned_backward

# Multiply-adds in the time that one element of a layer's output is read, changed and written: 20 to 40 measured on a
# CPU in float32, about 200 by the peak rates of a GPU with matrix units.
ELEMENT_COST = 100


class Stage(NamedTuple):
    """Consecutive layers of a model, on one device."""

    device: str
    model: keras.Model  # from the tensors that enter to those that leave; its layers are the whole model's own
    inputs: tuple[str, ...]  # names of the tensors that enter: the images, or outputs of any earlier stage
    outputs: tuple[str, ...]  # names of the tensors that a later stage takes; the logits from the last
    cost: int  # estimated, for one example: multiply-adds and what is as long as one
    watched: tuple[str, ...] = ()  # names of the tensors that are shown; those that are no outputs leave after these


def cut_in_stages(
    model: keras.Model, devices: Sequence[str], *, open_size: int = 32, watched: Sequence[str] = ()
) -> list[Stage]:
    """Cuts a model's layers, in the order they run, into one stage for each device.

    Of all cuts it takes one whose most expensive stage is cheapest. A layer's cost is estimated: the multiply-adds
    of its kernels (their elements times the positions of the output, the axes between batch and channels) and
    `ELEMENT_COST` for each element of its output. What is sent between devices costs nothing here. A layer that is
    itself a model stays whole.

    Args:
      model: functional, or a built `Sequential`; one input and one output.
      devices: such as `["/GPU:0", "/GPU:1"]`, in the order of the stages; one may serve several.
      open_size: what sizes the model leaves open (a speednet's side) are taken for when costs are estimated; the
        stages leave them open.
      watched: names of layers whose outputs `staged_call` is to give.

    Raises:
      ValueError: a model without a graph of layers, with several inputs or outputs or with a layer that is called
        more than once; no devices, or more than there are layers.
    """
    functional = _as_functional(model)
    shape = functional.inputs[0].shape[1:]
    calls = _trace(functional, shape)
    _check(model.name, calls, len(devices))
    costs = [_cost(call) for call in _trace(functional, [size or open_size for size in shape])]
    starts = cheapest_cuts(costs, len(devices))
    bounds = list(zip(starts, [*starts[1:], len(calls)], strict=True))
    return [
        _stage(device, calls[begin:end], calls[end:], sum(costs[begin:end]), watched)
        for device, (begin, end) in zip(devices, bounds, strict=True)
    ]


def staged_call(stages: Sequence[Stage], model: keras.Model) -> Callable[[Any, Any, tf.Tensor], tuple]:
    """`model.stateless_call` for training, with each stage's forward and backward pass on the stage's device.

    Operations are named `stage_0/...`, `stage_1/...`. Nothing but data orders them, so that a stage need not wait
    for another part of the batch. Keras masks do not pass from stage to stage.

    Returns:
      (weights, statistics, [B, ...] images) -> ([B, ...] logits, new statistics, outputs of the `watched` layers), with
      lists of tensors in the order of `model.trainable_variables` and `model.non_trainable_variables`. A statistic
      that did not change comes back as the tensor it was; one that did carries no gradient, nor do the outputs.
    """
    weights_of = _positions(model.trainable_variables, [s.model.trainable_variables for s in stages])
    statistics_of = _positions(model.non_trainable_variables, [s.model.non_trainable_variables for s in stages])

    def call(weights, statistics, images):
        live, statistics, seen = {stages[0].inputs[0]: images}, list(statistics), []
        for index, stage in enumerate(stages):
            forward = with_pinned_backward(stage.device, f"stage_{index}", functools.partial(_forward, stage))
            with tf.device(
                stage.device
            ):  # the copies that `with_pinned_backward` makes of what enters and leaves belong here too
                leaving, watched, changed = forward(
                    [weights[i] for i in weights_of[index]],
                    [statistics[i] for i in statistics_of[index]],
                    [live[name] for name in stage.inputs],
                )
            live |= dict(zip(stage.outputs, leaving, strict=True))
            seen += watched
            for position, value in changed.items():
                statistics[statistics_of[index][position]] = value
        return live[stages[-1].outputs[0]], statistics, seen

    return call


def variable_devices(stages: Sequence[Stage]) -> dict[str, str]:
    """Path of each variable of the model -> device of the stage that reads it."""
    return {variable.path: stage.device for stage in stages for variable in stage.model.variables}


@contextlib.contextmanager
def stage_placement(build: Callable[[], keras.Model], devices: Sequence[str], *, open_size: int = 32) -> Iterator[None]:
    """The variables of the model that is built inside, as `build` builds it, live with their stages, which are cut for
    images of its size or of `open_size`.

    Stages are cut from a model, which has its variables by then: a first one is built to learn the cut and the order
    in which variables are born. What follows a variable is pinned beside it; all else lives in the host's memory.

    Raises:
      ValueError: as `cut_in_stages` does.
    """
    born: list[tf.Variable] = []

    def note(next_creator, **creation):
        born.append(next_creator(**creation))
        return born[-1]

    with tf.variable_creator_scope(note):
        model = build()
    device_of = variable_devices(cut_in_stages(model, devices, open_size=open_size))
    by_variable = {id(variable.value): device_of[variable.path] for variable in model.variables}
    turns = iter([by_variable.get(id(variable), HOST) for variable in born])
    with custom_placement(lambda _, pinned_to: pinned_to or next(turns, HOST)):
        yield


def cheapest_cuts(costs: Sequence[int], stages: int) -> list[int]:
    """Where each of `stages` runs of consecutive costs starts, so that the largest sum of a run is smallest.

    Exact, by dynamic programming over (layers, stages): stages * layers^2 steps.

    >>> cheapest_cuts([3, 1, 1, 1, 4], 3)
    [0, 1, 4]
    """
    before = list(accumulate(costs, initial=0))
    best = [(cost, (0,)) for cost in before]  # best[n]: largest sum and starts of the first n costs in one run
    for used in range(1, stages):
        best = [
            min(
                ((max(best[n][0], before[end] - before[n]), (*best[n][1], n)) for n in range(used, end)),
                default=(math.inf, ()),
            )
            for end in range(len(before))
        ]
    return list(best[-1][1])


class LayerCost(NamedTuple):
    """What one layer of a model takes for one example."""

    name: str
    kind: str  # its class
    output: tuple[int, ...]  # shape, without the batch
    parameters: int  # trained or not
    flops: int  # two for each multiply-add of its kernels, forward


def layer_costs(model: keras.Model, *, open_size: int = 32) -> list[LayerCost]:
    """The layers of a functional model in the order they run, on images of its size or of `open_size`.

    Raises:
      ValueError: as `cut_in_stages` does for a model it cannot look into.
    """
    functional = _as_functional(model)
    shape = [size or open_size for size in functional.inputs[0].shape[1:]]
    return [
        LayerCost(
            call.layer.name,
            type(call.layer).__name__,
            tuple(next(iter(call.outputs.values())).shape[1:]),
            sum(math.prod(weight.shape) for weight in getattr(call.layer, "weights", ())),
            2 * _multiply_adds(call),
        )
        for call in _trace(functional, shape)
    ]


class _Call(NamedTuple):
    """One layer of a model and the symbolic tensors it takes and gives, by name."""

    layer: Any
    inputs: dict[str, keras.KerasTensor]
    outputs: dict[str, keras.KerasTensor]


def _as_functional(model: keras.Model) -> keras.Model:
    """The model as a plain functional one, which a `Sequential` becomes and a subclassed model cannot."""
    try:
        functional = keras.Model(model.inputs, model.outputs, name=model.name)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{model.name} has no graph of layers to cut; stages need a functional Keras model") from error
    inputs, outputs = len(model.inputs), len(model.outputs)
    if inputs != 1 or outputs != 1:
        raise ValueError(f"stages need a model of one input and one output; {model.name} has {inputs} and {outputs}")
    return functional


def _trace(functional: keras.Model, shape: Sequence[int | None]) -> list[_Call]:
    """The model's layers in the order they run, on examples of `shape`; the layers are shared, the tensors new."""
    images = keras.Input(tuple(shape), dtype=functional.inputs[0].dtype)
    names = {id(images): "images"}
    calls = []

    def record(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        outputs = {f"{layer.name}:{i}": tensor for i, tensor in enumerate(keras.tree.flatten(result))}
        names.update((id(tensor), name) for name, tensor in outputs.items())
        taken = [tensor for tensor in keras.tree.flatten((args, kwargs)) if isinstance(tensor, keras.KerasTensor)]
        calls.append(_Call(layer, {names[id(tensor)]: tensor for tensor in taken}, outputs))
        return result

    keras.models.clone_model(
        functional, input_tensors=[images], clone_function=lambda layer: layer, call_function=record
    )
    return calls


def _cost(call: _Call) -> int:
    """Multiply-adds of the layer's kernels for one example, and those in the time its output takes to be written."""
    elements = sum(math.prod(tensor.shape[1:]) for tensor in call.outputs.values())
    return _multiply_adds(call) + ELEMENT_COST * elements


def _multiply_adds(call: _Call) -> int:
    positions = max(math.prod(tensor.shape[1:-1]) for tensor in call.outputs.values())
    kernels = [weight for weight in getattr(call.layer, "weights", ()) if len(weight.shape) > 1]
    return positions * sum(math.prod(kernel.shape) for kernel in kernels)


def _check(name: str, calls: list[_Call], stages: int) -> None:
    layer, times = Counter(call.layer.name for call in calls).most_common(1)[0]
    if times > 1:
        raise ValueError(f"layer {layer!r} of {name} is called {times} times; a layer can be in one stage only")
    if stages < 1:
        raise ValueError(f"the stages of {name} need at least one device; none was given")
    if stages > len(calls):
        raise ValueError(f"{stages} stages need at least {stages} layers; {name} has {len(calls)}")


def _stage(device: str, calls: list[_Call], later: list[_Call], cost: int, watched: Sequence[str]) -> Stage:
    """The stage of `calls`: what enters is what it does not make; what leaves is what later calls or the eye take."""
    made = {name: tensor for call in calls for name, tensor in call.outputs.items()}
    entering = {name: tensor for call in calls for name, tensor in call.inputs.items() if name not in made}
    wanted = {name for call in later for name in call.inputs} if later else set(calls[-1].outputs)
    leaving = {name: tensor for name, tensor in made.items() if name in wanted}
    seen = {name: tensor for call in calls if call.layer.name in watched for name, tensor in call.outputs.items()}
    model = keras.Model(list(entering.values()), list((leaving | seen).values()))
    return Stage(device, model, tuple(entering), tuple(leaving), cost, tuple(seen))


def _positions(whole: Sequence, of_stages: Sequence[Sequence]) -> list[list[int]]:
    """For each stage, where its variables are among the whole model's."""
    position = {id(variable): index for index, variable in enumerate(whole)}
    return [[position[id(variable)] for variable in variables] for variables in of_stages]


def _forward(stage: Stage, weights: list, statistics: list, entering: list) -> tuple[list, list, dict[int, tf.Tensor]]:
    """What leaves a stage, what is watched in it, and its statistics that changed, by position."""
    made, new_statistics = stage.model.stateless_call(weights, statistics, entering, training=True)
    pairs = enumerate(zip(new_statistics, statistics, strict=True))
    # a stage's backward pass is given zeros for what no loss uses: do not compute with them
    changed = {index: tf.stop_gradient(new) for index, (new, old) in pairs if new is not old}
    made = dict(zip(dict.fromkeys(stage.outputs + stage.watched), keras.tree.flatten(made), strict=True))
    return [made[name] for name in stage.outputs], [tf.stop_gradient(made[name]) for name in stage.watched], changed
