"""A Keras model on several towers, behind its own `fit`, `evaluate` and `predict`; and questions
about Keras models.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar_towers.towers.devices import Tower
from cifar_towers.towers.gradients import weighted_sum
from cifar_towers.towers.make_parallel import (
    check_outputs,
    join_outputs,
    resolve_towers,
    run_on_any_batch,
)

# Distance between the seeds of neighboring towers. Keras draws its default seeds below it.
TOWER_SEED_STRIDE = 1_000_000_007
# methods of saving, and one of former versions
NOT_OF_FIT = ("loss", "get_compile_config", "compile_from_config")
# what a parallel model takes from the original: files, descriptions, which variables are trained
OF_ORIGINAL = ["save", "save_weights", "save_own_variables", "load_weights", "load_own_variables"]
OF_ORIGINAL += ["export", "summary", "get_layer", "get_config", "get_build_config"]
OF_ORIGINAL += ["get_compile_config", "_obj_type", "layers"]
OF_ORIGINAL += ["trainable_variables", "trainable_weights"]
ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}  # by type of their operation


def make_parallel_model(
    keras_model: keras.Model, num_towers: int | Sequence[Tower]
) -> "ParallelModel":
    """Return a Keras model that computes on several towers and shares the variables of
    `keras_model`.

    Compile, `fit`, `evaluate` and `predict` it like the original; batches may have any length.
    There is one loss, over the outputs of all towers. A model without batch statistics and random
    numbers therefore trains the same on any number of towers, to rounding. `save`, `export` and
    `load_weights` read and write files of the original.

    Non-trainable state is updated once a step. Each tower normalizes by its own shard, and moving
    statistics become the mean over the towers, weighted by examples, as do losses that layers add.
    Each row of an output must depend on its own example, and each loss be a mean over examples.
    Seed generators advance like the first tower's, and each tower draws different numbers.

    The model's `call` must write no `tf.Variable`, as every tower would. XLA compiles for one
    device and stays off.

    Args:
      num_towers: their number, or the towers of `make_towers`.

    Raises:
      ValueError: the model overrides what `fit`, `evaluate` or `predict` call, or has a
        synchronized norm. Its first call raises the same for an output without a row for each
        example, and for state that the towers cannot share, such as an integer counter.
    """
    towers = resolve_towers(num_towers)
    method = overridden_fit_method(keras_model)
    if method:
        raise ValueError(
            f"model {keras_model.name!r} overrides {method}, which towers would not run"
        )
    norm = synchronized_norm(keras_model)
    if norm and len(towers) > 1:
        raise ValueError(
            f"layer {norm!r} is synchronized, and here towers normalize by shards; make it "
            "synchronized=False"
        )
    return ParallelModel(keras_model, towers)


class TowerPass(NamedTuple):
    """The result of the forward pass of one tower."""

    outputs: Any  # a structure of [B/K, ...]
    extras: dict[tuple[int, str], tf.Tensor]  # masks and logits, by output index and attribute
    losses: list[tf.Tensor]  # scalars that layers added
    state: dict[int, tf.Tensor]  # new values of the non-trainable variables, by position


class ParallelModel(keras.Model):
    """The model that `make_parallel_model` returns."""

    def __init__(self, model: keras.Model, towers: Sequence[Tower]):
        # float32 without autocast: the original casts its inputs and variables itself, inside each
        # tower
        super().__init__(name=model.name, dtype="float32", autocast=False)
        self.model = model
        self._towers = tuple(towers)
        self.supports_jit = False  # XLA compiles for one device
        self.built = True

    # `keras.saving` reads a model's class and attributes; let it see the original's.
    __class__ = property(lambda self: type(vars(self).get("model", self)))

    def __dir__(self) -> list[str]:
        return dir(self.model)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not assigned yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Run the forward pass on all towers, then update the model's non-trainable state once."""
        passes, sizes = run_on_any_batch(
            functools.partial(self.on_tower, training), self._towers, inputs
        )
        total = sum(sizes)
        fractions = [size / total for size in sizes]

        for losses in zip(*[each.losses for each in passes], strict=True):
            self.add_loss(weighted_sum(losses, fractions, device=""))
        for position in passes[0].state:
            variable = self.model.non_trainable_variables[position]
            values = [each.state[position] for each in passes]
            is_seed = is_seed_generator_state(variable)
            variable.assign(values[0] if is_seed else weighted_sum(values, fractions, device=""))

        outputs, extras = join_outputs([(each.outputs, each.extras) for each in passes], sizes)
        flat = tf.nest.flatten(outputs)
        for (index, name), tensor in extras.items():
            if name in ACTIVATIONS:
                flat[index] = ACTIVATIONS[name](tensor)
            else:
                setattr(flat[index], name, tensor)
        return tf.nest.pack_sequence_as(outputs, flat)

    def on_tower(self, training: bool | None, tower: Tower, inputs: Any) -> "TowerPass":
        """Run the forward pass of one tower, which reads the model's variables and writes none."""
        values = []
        for variable in self.model.variables:
            value = tf.convert_to_tensor(variable.value)
            if is_seed_generator_state(variable):
                value += tower.index * TOWER_SEED_STRIDE
            values.append((variable, value))

        with keras.StatelessScope(values, collect_losses=True) as scope:
            outputs = self.model(inputs, training=training)

        changed = [v for v, before in values if scope.get_current_value(v) is not before]
        besides_seeds = [v for v in changed if not is_seed_generator_state(v)]
        refused = [v.path for v in besides_seeds if v.trainable or "float" not in v.dtype]
        if scope.state_mapping.keys() - {id(v) for v, _ in values}:
            refused.append(
                "a variable that it did not have before, such as a metric or the global random "
                "generator (call a model without keras.Input once before)"
            )
        if refused:
            raise ValueError(
                f"the model's call writes {', '.join(refused)}; towers can only share its seed "
                "generators, and float variables that are not trained, which are averaged"
            )
        check_outputs(outputs, inputs, tower)

        ids = [id(variable) for variable in self.model.non_trainable_variables]
        state = {}
        for variable in changed:
            state[ids.index(id(variable))] = tf.stop_gradient(scope.get_current_value(variable))
        extras = {}
        for index, output in enumerate(tf.nest.flatten(outputs)):
            for name, tensor in _extras(output).items():
                extras[index, name] = tensor
        losses = [to_scalar(loss) for loss in scope.losses]
        return TowerPass(outputs, extras, losses, state)

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Compile the original too, with the same optimizer, so that a saved model can be trained
        further.
        """
        self.model.compile(optimizer, *args, **kwargs)
        super().compile(self.model.optimizer, *args, **kwargs)


for name in OF_ORIGINAL:
    setattr(ParallelModel, name, property(operator.attrgetter(f"model.{name}")))


def _extras(output: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return an output's mask, and the logits that Keras's cross entropies use where it is their
    softmax or sigmoid.
    """
    attributes = {}
    for name in ("_keras_logits", "_keras_mask"):
        value = getattr(output, name, None)
        if value is not None:
            attributes[name] = value

    # in graphs, Keras also takes the input of TensorFlow's own operation
    op = getattr(output, "op", None)
    if op and op.type in ACTIVATIONS and "_keras_logits" not in attributes:
        # a new tensor, then its attributes
        return {op.type: op.inputs[0], **attributes}
    return attributes


# ---- What is asked of a Keras model, here and in the folders above


def to_scalar(loss: tf.Tensor) -> tf.Tensor:
    """Return the sum of a loss that a layer adds, as Keras takes it; a scalar is returned as it
    is.
    """
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)


def is_seed_generator_state(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


def overridden_fit_method(model: keras.Model) -> str:
    """Return the name of a method or property behind `fit`, `evaluate` and `predict` that a model
    overrides, or "".
    """
    trainers = [base for base in keras.Model.__mro__ if base.__name__.endswith("Trainer")]
    names = list(itertools.chain.from_iterable(map(vars, trainers)))
    names = [name for name in names if not name.startswith("__") and name not in NOT_OF_FIT]
    names += ["losses", "trainable_variables", "trainable_weights", "non_trainable_variables"]
    for name in names:
        is_inherited = getattr(type(model), name) is getattr(keras.Model, name)
        if name in vars(model) or not is_inherited:
            return name
    return ""


def synchronized_norm(model: keras.Model) -> str:
    """Return the name of a layer that is made with `synchronized=True`, or "" if there is none."""
    return next(
        (layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False)),
        "",
    )
