"""What all optimizers promise, and the numbers of each update rule against NumPy and Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from cifar_towers.config.schedules import RunLength
from cifar_towers.config.train_config import OptimizerSettings
from cifar_towers.registry import OPTIMIZERS
from cifar_towers.training.optimizers import (
    AdamW,
    Momentum,
    Muon,
    main_rate,
    make_optimizer,
    orthogonalize,
    split_by_role,
    variable_name,
)
from cifar_towers.training.state import TrainState

RATES = {"learning_rate": 0.2, "bias_learning_rate": 0.4, "head_learning_rate": 0.5}
LENGTH = RunLength(10, 10, 10)


def convolutions():
    """Return a net of two convolutions and a dense layer `last`."""
    keras.utils.set_random_seed(0)
    x = images = keras.Input((5, 5, 3))
    for name in ("first", "conv"):
        x = keras.layers.Conv2D(4, 2, name=name)(x)
    x = keras.layers.Dense(2, name="last")(keras.layers.Flatten()(x))
    return keras.Model(images, x)


@pytest.fixture(params=OPTIMIZERS)
def state(request):
    """Return the state of a net with variables in every role, for each optimizer."""
    model = convolutions()
    settings = OptimizerSettings(
        optimizer=request.param,
        learning_rate_schedule="step:0=1",
        weight_decay=0.05,
        momentum=0.9,
        muon_momentum=0.6,
        **RATES,
    )
    optimizer = make_optimizer(settings, model, LENGTH)
    return TrainState(model, optimizer, 10, ema_decay=0.9, lookahead=True)


def update(state, gradients, finite=True):
    """Make an update at the rates of step 1; return its result, and the names of what it
    changed.
    """
    before = {name: variable.numpy() for name, variable in state.named_variables().items()}
    rates = state.optimizer.learning_rates(1).items()
    rates = {name: tf.constant(rate, tf.float32) for name, rate in rates}
    pairs = list(zip(gradients, state.weights, strict=True))
    tower_losses = tf.constant([1.0, 1.0 if finite else np.nan])
    result = state.apply(pairs, [], rates, tower_losses)

    changed = set()
    for name, variable in state.named_variables().items():
        if not np.array_equal(variable.numpy(), before[name]):
            changed.add(name)
    return result, changed


def test_weight_decay_takes_the_same_fraction_of_every_group(state):
    """Without gradients a step takes 0.2 x 0.05 = 1 % of a weight, also in groups with another
    learning rate.
    """
    expected = {"kernels": 0.2, "biases": 0.4, "head": 0.5}

    assert state.optimizer.learning_rates(1) == pytest.approx(expected, rel=1e-6)

    state.step.assign(1)  # where Muon does not rescale
    for weight in state.weights:
        weight.assign(tf.ones_like(weight))
    update(state, [tf.zeros_like(weight) for weight in state.weights])
    for weight in state.weights:
        expected = 0.99 * np.ones(weight.shape)
        np.testing.assert_allclose(weight, expected, rtol=1e-6, err_msg=weight.name)


def test_the_rate_of_every_role_follows_the_schedule():
    settings = OptimizerSettings(learning_rate_schedule="linear:0=0.5,50%=1,100%=0", **RATES)
    optimizer = make_optimizer(settings, convolutions(), LENGTH)
    for step, factor in {0: 0.5, 1: 0.6, 3: 0.8, 5: 1, 6: 0.8, 9: 0.2}.items():
        expected = {"kernels": 0.2 * factor, "biases": 0.4 * factor, "head": 0.5 * factor}
        assert optimizer.learning_rates(step) == pytest.approx(expected, rel=1e-6)


def test_without_a_gradient_a_variable_and_its_slots_rest(state):
    (biases,) = [group for group in state.optimizer.groups if group.name == "biases"]
    still = {id(variable) for variable in biases.rule.variables}
    still |= {id(w) for w in state.weights if variable_name(w) == "conv/kernel"}
    gradients = [None if id(w) in still else tf.ones_like(w) for w in state.weights]
    _, moved = update(state, gradients)
    weights = {"model.first.kernel", "model.last.kernel"}

    def groups_of_slots(names):
        return {name.split(".")[1] for name in names if name.startswith("optimizer.")}

    assert {name for name in moved if name.startswith("model.")} == weights
    assert groups_of_slots(moved) == groups_of_slots(state.named_variables()) - {"biases"}


@pytest.mark.parametrize(("gradient", "finite"), [(1.0, False), (np.inf, True), (np.nan, True)])
def test_a_step_that_is_not_finite_changes_no_weight_slot_or_average(state, gradient, finite):
    state.step.assign(4)  # the next one is due for lookahead
    gradients = [tf.ones_like(weight) for weight in state.weights]
    gradients[0] *= gradient
    (updated, _), moved = update(state, gradients, finite=finite)
    assert not updated
    assert moved == {"step"}


def test_muon_leaves_a_kernel_of_zeros_unscaled():
    rule = Muon([tf.Variable(tf.zeros([3, 3, 2, 4]))], 0.5, total_steps=100)
    gradient = tf.ones([3, 3, 2, 4])
    for step in (0, 2):
        assign(rule.compute_update(0, gradient * step, tf.constant(0.1), tf.constant(step)))
        assert np.isfinite(rule.variables[0]).all()
        assert np.any(rule.variables[0]) == (step > 0)


def test_norm_of_a_sparse_gradient_is_that_of_the_dense_one(state):
    """The rows of one index are added first, as those of several towers."""
    rows = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [2.0, 2.0]]), tf.constant([1, 1]), tf.constant([36, 2])
    )
    gradients = [
        rows if variable_name(weight) == "last/kernel" else None for weight in state.weights
    ]
    (_, norm), _ = update(state, gradients)

    assert float(norm) == pytest.approx(5.0)


def level_singular_values(kernel):
    """Return the kernel with three Newton-Schulz steps on its singular values, by NumPy's
    decomposition.
    """
    u, s, v = np.linalg.svd(kernel.reshape(-1, kernel.shape[-1]).astype("f8"), full_matrices=False)
    s /= np.linalg.norm(s)
    for _ in range(3):
        s = 3.4576 * s - 4.7391 * s**3 + 2.0843 * s**5
    assert 0.5 < np.median(s) < 1.35
    return (u @ np.diag(s) @ v).reshape(kernel.shape)


@pytest.mark.parametrize("shape", [(3, 3, 8, 16), (1, 1, 4, 16), (2, 2, 4, 16), (2, 1, 1, 1)])
def test_orthogonalized_kernels_keep_their_directions_and_level_their_singular_values(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype("f4")
    found = orthogonalize(tf.constant(kernel))
    np.testing.assert_allclose(found, level_singular_values(kernel), atol=1e-5)


def assign(updates):
    for variable, value in updates:
        variable.assign(value)


def momentum_by_numpy(weight, slots, gradient, rate, step, momentum, nesterov, weight_decay):
    direction = gradient + weight_decay * weight
    if not momentum:
        return weight - rate * direction, {}
    buffer = momentum * slots.get("momentum", 0.0) + direction
    change = direction + momentum * buffer if nesterov else buffer
    return weight - rate * change, {"momentum": buffer}


def muon_by_numpy(weight, slots, gradient, rate, step, momentum, total_steps, weight_decay):
    """Every second step, and in the middle of the run every eighth, also rescales to norm
    sqrt(C_out).
    """
    buffer = momentum * slots.get("momentum", 0.0) + gradient
    if step in (0, 2, 40):
        weight = weight * np.sqrt(weight.shape[-1]) / np.linalg.norm(weight)
    direction = level_singular_values(gradient + momentum * buffer)
    return weight * (1 - rate * weight_decay) - rate * direction, {"momentum": buffer}


@pytest.mark.parametrize(
    ("rule", "reference", "settings"),
    [
        (Momentum, momentum_by_numpy, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1}),
        (Momentum, momentum_by_numpy, {"momentum": 0.5, "nesterov": False, "weight_decay": 0.1}),
        (Momentum, momentum_by_numpy, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}),
        (Muon, muon_by_numpy, {"momentum": 0.5, "total_steps": 100, "weight_decay": 2.0}),
    ],
)
def test_updates_and_slots_by_numpy_while_the_rate_changes(rule, reference, settings):
    generator = np.random.default_rng(0)
    slots = {}
    weight = generator.normal(size=(1, 1, 3, 5)).astype("f4")
    ours = rule([tf.Variable(weight)], **settings)
    for step, rate in ((0, 0.2), (1, 0.1), (2, 0.1), (40, 0.05), (42, 0.05)):
        gradient = generator.normal(size=weight.shape).astype("f4")
        weight, slots = reference(
            weight.astype("f8"), slots, gradient.astype("f8"), rate, step, **settings
        )
        assign(ours.compute_update(0, tf.constant(gradient), tf.constant(rate), tf.constant(step)))
        np.testing.assert_allclose(ours.variables[0], weight, rtol=1e-4, atol=1e-5)

    assert {name for name, variables in ours.slots.items() if variables} == slots.keys()

    for name, value in slots.items():
        np.testing.assert_allclose(ours.slots[name][0], value, rtol=1e-4, atol=1e-6)


def test_adamw_agrees_with_keras():
    start = np.array([0.3, -1.0], "f4")
    generator = np.random.default_rng(0)
    rule = AdamW([tf.Variable(start)], weight_decay=0.1)
    witness = keras.Variable(start)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-8)
    for step in range(50):
        gradient = tf.constant(generator.normal(size=2), tf.float32)
        assign(rule.compute_update(0, gradient, tf.constant(0.01), tf.constant(step)))
        optimizer.apply([gradient], [witness])

    np.testing.assert_allclose(rule.variables[0], witness.numpy(), rtol=1e-4)


def in_other_order():
    """Return a net whose `call` runs its layers in another order than that in which they were
    assigned.
    """

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(5, name="head")
            self.body = keras.layers.Dense(7, name="body")

        def call(self, images):
            return self.head(self.body(images))

    images = keras.Input((3,))
    return keras.Model(images, Net()(images))


def without_trained_kernels():
    frozen = keras.layers.Dense(2, trainable=False)
    return keras.Sequential(
        [keras.Input((3,)), frozen, keras.layers.BatchNormalization(name="norm")]
    )


@pytest.mark.parametrize(
    ("make", "kernels", "head", "num_biases"),
    [
        (convolutions, ["first", "conv"], ["last"], 3),
        (in_other_order, ["body"], ["head"], 2),
        (without_trained_kernels, [], [], 2),
    ],
)
def test_roles_of_variables(make, kernels, head, num_biases):
    """The head is the last kernel with an output for each class."""
    model = make()
    layer_of = {}
    for variable in model.trainable_variables:
        layer_of[id(variable.value)] = variable.path.split("/")[-2]
    layers = {}
    for role, variables in split_by_role(model).items():
        layers[role] = [layer_of[id(variable)] for variable in variables]

    assert len(layers.pop("biases")) == num_biases
    assert layers == {"kernels": kernels, "head": head}


def test_momentum_and_weight_decay_are_summed_in_one_order():
    """TensorFlow may sum three terms in the order in which they are ready, so a step has no sum of
    three.
    """
    rule = Momentum([tf.Variable(tf.ones([8, 8]))], 0.9, weight_decay=0.01)

    @tf.function(autograph=False)
    def compute(gradient):
        updates = rule.compute_update(0, gradient, tf.constant(0.1), 0)
        _, value = updates[0]
        return value

    context.context().enable_graph_collection()
    try:
        moved = compute(tf.ones([8, 8]))
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    sums = []
    for graph in graphs:
        nodes = graph.post_optimization_graph.node
        sums += [node for node in nodes if node.op.startswith("Add")]

    assert sums
    assert all(len(node.input) == 2 for node in sums)
    np.testing.assert_allclose(moved, np.full([8, 8], 1.01))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"biases": 3, "kernels": 1, "head": 2}, 1),
        ({"biases": 3, "head": 2}, 2),  # a net whose only kernel is the head
        ({"biases": 3}, 3),
    ],
)
def test_the_rate_that_is_shown_is_that_of_the_kernels(rates, expected):
    assert main_rate(rates) == expected
