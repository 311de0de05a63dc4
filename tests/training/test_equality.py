"""However variables are placed and gradients combined: the step is that of one device.

The witness is a plain `tf.GradientTape` on one device, with momentum by hand.
"""

import functools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config.train_config import AugmentationSettings
from cifar_towers.data import synthetic
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.models.layers import Activation, BatchNorm, Conv2D, synchronize
from cifar_towers.towers import variable_placement
from cifar_towers.towers.placement import PLACEMENTS
from cifar_towers.training.distributed_step import MirroredStep, make_strategy
from cifar_towers.training.losses import EXAMPLE_LOSS
from cifar_towers.training.optimizers import Momentum, Optimizer, ParamGroup
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import as_tf_function, make_update

pytestmark = pytest.mark.gpu
STEPS = 4
BATCH = 48
RATE = 0.1
MOMENTUM = 0.9
BOUND = 1e-4
AUGMENTATION = Augmentation(AugmentationSettings(shift=2, brightness=8.0))


class Case(NamedTuple):
    """A way to combine towers."""

    strategy: str
    placement: str
    num_towers: int
    micro_batches: int


QUICK = [
    Case("towers", "cpu", 1, 4),
    Case("towers", "round_robin", 2, 1),
    Case("towers", "least_loaded", 4, 1),
    Case("mirrored", "", 2, 1),
    Case("mirrored", "", 2, 2),
]
SLOW = [Case("towers", "cpu", 1, 1), Case("towers", "cpu", 2, 2)]
SLOW += [Case("towers", placement, 2, 1) for placement in PLACEMENTS if placement != "round_robin"]
SLOW += [Case("towers", placement, 4, 1) for placement in PLACEMENTS if placement != "least_loaded"]
SLOW += [Case("mirrored", "", 1, 4), Case("mirrored", "", 1, 1), Case("mirrored", "", 4, 1)]


def small_net(synchronized=False):
    """Two convolutions with batch norm and smooth activations: nothing in it decides, so rounding
    stays rounding.

    One norm is Keras's.
    """
    keras.utils.set_random_seed(0)
    x = images = keras.Input((32, 32, 3))
    for width, norm in (
        (8, BatchNorm(name="norm")),
        (16, keras.layers.BatchNormalization(name="of_keras")),
    ):
        x = Conv2D(width, 3, strides=2, padding="same", use_bias=False, name=f"conv{width}")(x)
        x = Activation("silu", name=f"silu{width}")(norm(x))
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(images, keras.layers.Dense(10, name="head")(x), name="small_net")
    if synchronized:
        synchronize(model)
    return model


def loss_fn(labels, logits, weights, model_losses=()):
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return {EXAMPLE_LOSS: loss, "total_loss": loss}


@pytest.fixture(scope="module")
def batches():
    return list(Batches(synthetic.make(480, 0, 0), BATCH, 0).stream(0, STEPS))


def after_steps(state, step, batches):
    for batch in batches:
        step(batch, {"all": tf.constant(RATE)})
    return {v.path: v.numpy() for v in state.model.variables}


def make_state(synchronized=False):
    model = small_net(synchronized)
    rule = Momentum([v.value for v in model.trainable_variables], MOMENTUM)
    optimizer = Optimizer([ParamGroup("all", rule, RATE)], lambda step: 1.0)
    return TrainState(model, optimizer, STEPS)


def combined(strategy, placement, towers, batches, synchronized=False, **options):
    """Return the net's variables after all steps."""
    if strategy == "mirrored":
        mirrored = make_strategy(towers)
        with mirrored.scope():
            state = make_state(synchronized)
        update = MirroredStep(mirrored, state, towers, loss_fn, AUGMENTATION, **options).update
    else:
        with variable_placement(placement, towers):
            state = make_state(synchronized)
        update = make_update(
            state, towers, loss_fn, AUGMENTATION, synchronized=synchronized, **options
        )
    return after_steps(state, as_tf_function(update), batches)


@pytest.fixture(scope="module")
def witness(batches):
    """witness(parts): the same on one device; batch norm sees each of `parts` parts of the batch by
    itself.
    """

    @functools.cache
    def one_device(parts):
        size = BATCH // parts
        model = small_net()
        statistics = model.non_trainable_variables
        buffers = [np.zeros(v.shape, np.float32) for v in model.trainable_variables]
        for batch in batches:
            images = AUGMENTATION.augment(batch.images, batch.draws)
            before = [v.numpy() for v in statistics]
            gradients = []
            moved = []
            for part in range(parts):
                for variable, value in zip(statistics, before, strict=True):
                    variable.assign(value)
                chosen = slice(size * part, size * (part + 1))
                with tf.GradientTape() as tape:
                    logits = model(images[chosen], training=True)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                        batch.labels[chosen], logits
                    )
                    loss = tf.reduce_mean(losses)
                weights = [v.value for v in model.trainable_variables]
                gradients.append([g.numpy() for g in tape.gradient(loss, weights)])
                moved.append([v.numpy() for v in statistics])
            for variable, buffer, *of_parts in zip(
                model.trainable_variables, buffers, *gradients, strict=True
            ):
                buffer *= MOMENTUM
                buffer += np.mean(of_parts, 0)
                variable.assign(variable - RATE * buffer)
            for variable, *of_parts in zip(statistics, *moved, strict=True):
                variable.assign(np.mean(of_parts, 0))
        return {v.path: v.numpy() for v in model.variables}

    return one_device


def largest_difference(one, other):
    """Over all variables, relative to the largest value of each."""
    assert one.keys() == other.keys()
    return max(np.max(np.abs(one[path] - other[path])) / np.max(np.abs(one[path])) for path in one)


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_every_placement_and_strategy_equals_one_device(towers, batches, witness, case):
    """Without `synchronized`, batch norm sees the parts of a batch: one for each tower and
    micro-batch.
    """
    train = functools.partial(
        combined, case.strategy, case.placement, towers(case.num_towers), batches
    )
    num_parts = case.num_towers * case.micro_batches
    by_parts = train(micro_batches=case.micro_batches)

    assert largest_difference(witness(num_parts), by_parts) < BOUND
    if num_parts > 1:  # this net can tell the two apart
        assert largest_difference(witness(1), by_parts) > BOUND
    if case.micro_batches == 1:
        assert largest_difference(witness(1), train(synchronized=True)) < BOUND
