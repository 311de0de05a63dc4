import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.registry import OPTIMIZERS
from cifar_towers.training.build import role_schedules
from cifar_towers.training.optimizers import (
    AdamW,
    Momentum,
    Muon,
    Optimizer,
    ParamGroup,
    make_optimizer,
    orthogonalize,
    split_by_role,
)
from cifar_towers.training.state import TrainState
from tests.training.runs import Run

RATE = (0.1, lambda step: 1.0)
SETTINGS = {
    "learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True, "muon_momentum": 0.6,
    "total_steps": 10,
}  # fmt: skip


def assign(moves):
    for variable, value in moves:
        variable.assign(value)


def run(rule, gradients, rates):
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        assign(rule.compute_update(0, tf.constant(gradient), tf.constant(rate), tf.constant(step, tf.int64)))
    return rule.variables[0].numpy()


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_momentum_steps_by_hand(nesterov):
    # w = 1, decay 0.1: d1 = 1.1, m1 = 1.1; plain: w = 1 - 0.2 * 1.1 = 0.78; d2 = 1 + 0.078 = 1.078, m2 = 1.628,
    # w = 0.78 - 0.1 * 1.628 = 0.6172. Nesterov: w = 1 - 0.2 * 1.65 = 0.67; d2 = 1.067, m2 = 1.617, w -= 0.1 * 1.8755
    expected = {False: [0.6172], True: [0.67 - 0.18755]}[nesterov]
    w = run(Momentum([tf.Variable([1.0])], 0.5, nesterov, 0.1), [[1.0], [1.0]], [0.2, 0.1])
    np.testing.assert_allclose(w, expected, rtol=1e-6)


def test_plain_sgd_keeps_no_slots():
    rule = Momentum([tf.Variable([1.0])], momentum=0.0)
    np.testing.assert_allclose(run(rule, [[2.0]], [0.25]), [0.5])
    assert rule.slots["momentum"] == []


@pytest.mark.parametrize(
    ("rule", "settings", "keras_rule", "keras_settings", "rate", "rtol"),
    [
        (Momentum, {"nesterov": False}, keras.optimizers.SGD, {"momentum": 0.9, "nesterov": False}, 0.05, 2e-5),
        (Momentum, {"nesterov": True}, keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}, 0.05, 2e-5),
        (AdamW, {"weight_decay": 0.1}, keras.optimizers.AdamW, {"weight_decay": 0.1, "epsilon": 1e-8}, 0.01, 1e-4),
    ],
)
def test_rules_agree_with_keras_at_a_constant_rate(rule, settings, keras_rule, keras_settings, rate, rtol):
    start, gradients = np.array([0.3, -1.0], "f4"), np.random.default_rng(0).normal(size=(50, 2)).astype("f4")
    ours = run(rule([tf.Variable(start)], **settings), gradients, [rate] * 50)
    theirs, optimizer = keras.Variable(start), keras_rule(rate, **keras_settings)
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [theirs])
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=rtol)


def newton_schulz(x):
    """Three steps on a number: what happens to each singular value."""
    for _ in range(3):
        x = 3.4576 * x - 4.7391 * x**3 + 2.0843 * x**5
    return x


def level_singular_values(kernel):
    """Return the kernel with Newton-Schulz steps on its singular values, by NumPy's decomposition."""
    u, s, v = np.linalg.svd(kernel.reshape(-1, kernel.shape[-1]).astype("f8"), full_matrices=False)
    leveled = newton_schulz(s / np.linalg.norm(s))
    assert 0.5 < np.median(leveled) < 1.35
    return (u @ np.diag(leveled) @ v).reshape(kernel.shape)


@pytest.mark.parametrize("shape", [(3, 3, 8, 16), (1, 1, 4, 16), (2, 2, 4, 16), (2, 1, 1, 1)])
def test_orthogonalized_kernels_keep_their_directions_and_level_their_singular_values(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype("f4")
    np.testing.assert_allclose(orthogonalize(tf.constant(kernel)), level_singular_values(kernel), atol=1e-5)


@pytest.mark.parametrize(("step", "rescales"), [(1, False), (2, True), (40, True), (42, False)])
def test_muon_update_by_numpy(step, rescales):
    """Every second step, and in the middle of the run every eighth, also rescales the kernel to norm sqrt(C_out).

    Weight decay takes 0.1 x 2.0 of the kernel in every step.
    """
    start = np.random.default_rng(0).normal(size=(1, 1, 3, 5)).astype("f4")
    gradient = np.random.default_rng(1).normal(size=start.shape).astype("f4")
    rule = Muon([tf.Variable(start)], momentum=0.5, total_steps=100, weight_decay=2.0)
    rule.slots["momentum"][0].assign(np.ones_like(start))
    assign(rule.compute_update(0, tf.constant(gradient), tf.constant(0.1), tf.constant(step, tf.int64)))
    kept = 0.8 * start * (np.sqrt(5) / np.linalg.norm(start) if rescales else 1.0)
    expected = kept - 0.1 * level_singular_values(gradient + 0.5 * (0.5 + gradient))
    np.testing.assert_allclose(rule.variables[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rule.slots["momentum"][0], 0.5 + gradient, rtol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_takes_the_same_fraction_of_every_group(towers, examples, optimizer):
    """Without gradients each step takes 0.2 x 0.05 = 1 % of a weight, also in groups with another learning rate."""
    rates = {"learning_rate": 0.2} | {f"{group}_learning_rate": 0.4 for group in ("bias", "head", "whitening")}
    settings = {"weight_decay": 0.05, "learning_rate_schedule": "step:0=1", "whitening_epochs": 1e6}
    settings |= {"model": "speednet94", "batch_size": 8, "whitening_images": 50}
    trained = Run(towers(1), examples, TrainConfig(optimizer=optimizer, **settings, **rates))
    assert {"kernels", "biases", "head", "whitening"} == set(trained.rates(1))
    for weight in trained.state.weights:
        weight.assign(tf.ones_like(weight))
    gradients = [(tf.zeros_like(weight), weight) for weight in trained.state.weights]
    assign(trained.state.optimizer.compute_updates(gradients, trained.rates(1), tf.constant(1, tf.int64)))
    for weight in trained.state.weights:
        np.testing.assert_allclose(weight, 0.99 * np.ones(weight.shape), rtol=1e-6, err_msg=weight.name)


def test_groups_have_their_own_rates_and_no_gradient_means_no_update():
    a, b, c = (tf.Variable([1.0]) for _ in range(3))
    groups = [
        ParamGroup("a", Momentum([a], 0.0), 0.1, lambda step: step + 1),
        ParamGroup("bc", Momentum([b, c], 0.0), 1.0, lambda step: 0.5),
        ParamGroup("empty", Momentum([], 0.0), 1.0, lambda step: 1.0),
    ]
    optimizer = Optimizer(groups)
    assert optimizer.learning_rates(1) == {"a": 0.2, "bc": 0.5}
    rates = {name: tf.constant(rate) for name, rate in optimizer.learning_rates(1).items()}
    gradients = [(None, c), (tf.constant([1.0]), b), (tf.constant([1.0]), a)]
    assign(optimizer.compute_updates(gradients, rates, tf.constant(1)))
    np.testing.assert_allclose([a[0], b[0], c[0]], [0.8, 0.5, 1.0])


def test_constraints_hold_after_every_update():
    """The value that is assigned is the constrained one, as in Keras's optimizers."""
    images = keras.Input((3,))
    model = keras.Model(images, keras.layers.Dense(2, kernel_constraint="non_neg", bias_initializer="ones")(images))
    weights = [v.value for v in model.trainable_variables]
    optimizer = Optimizer([ParamGroup("all", Momentum(weights), 0.5, lambda step: 1.0)])
    state = TrainState(model, optimizer, ["total_loss"], 10)
    before = weights[0].numpy()
    gradients = [(tf.constant([[1.0, -1.0]] * 3), weights[0]), (tf.constant([8.0, 0.0]), weights[1])]
    losses = {"total_loss": tf.constant(1.0)}
    update = state.apply(gradients, [], losses, {"all": tf.constant(0.5)}, tf.constant(True))
    assert update.updated and (before < 0.5).any()
    np.testing.assert_allclose(weights[0], np.maximum(before - [0.5, -0.5], 0))
    np.testing.assert_allclose(weights[1], [-3.0, 1.0])


def test_norm_of_a_sparse_gradient_is_that_of_the_dense_one():
    """The rows of one index are added first, as those of several towers."""
    images = keras.Input((3,))
    model = keras.Model(images, keras.layers.Dense(2, use_bias=False)(images))
    (weight,) = (v.value for v in model.trainable_variables)
    optimizer = Optimizer([ParamGroup("all", Momentum([weight]), 0.5, lambda step: 1.0)])
    state = TrainState(model, optimizer, ["total_loss"], 10)
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [2.0, 2.0]]), tf.constant([1, 1]), tf.constant([3, 2]))
    losses = {"total_loss": tf.constant(1.0)}
    update = state.apply([(rows, weight)], [], losses, {"all": tf.constant(0.5)}, tf.constant(True))
    assert float(update.gradient_norm) == pytest.approx(5.0)


def test_model_without_trained_kernels_has_no_head():
    images = keras.Input((3,))
    normalised = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(2, trainable=False)(images))
    model, schedules = keras.Model(images, normalised), role_schedules(TrainConfig(), RunLength(10, 10, 10))
    optimizer = make_optimizer("momentum", model, schedules, **SETTINGS)
    assert list(optimizer.learning_rates(5)) == ["biases"]


def test_roles_by_name_belong_to_the_speednets():
    """A net of the user's may call its layers what it likes."""
    images = outputs = keras.Input((9, 9, 3))
    for name in ("whitening", "group1_conv1", "conv2", "last"):
        outputs = keras.layers.Conv2D(2, 2, name=name)(outputs)
    model = keras.Model(images, outputs)
    count = {role: len(found) for role, found in split_by_role(model).items()}
    assert count == {"kernels": 3, "biases": 4, "head": 1, "whitening": 0}
    count = {role: len(found) for role, found in split_by_role(model, True).items()}
    assert count == {"kernels": 2, "biases": 3, "head": 1, "whitening": 2}


def test_the_head_is_the_last_kernel_with_an_output_for_each_class():
    """Also in a net whose `call` runs its layers in another order than that in which they were assigned."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(5)
            self.body = keras.layers.Dense(7)

        def call(self, images):
            return self.head(self.body(images))

    images = keras.Input((3,))
    net = Net()
    roles = split_by_role(keras.Model(images, net(images)))
    assert roles["head"][0] is net.head.kernel.value and roles["kernels"][0] is net.body.kernel.value


def test_every_optimizer_has_a_rule_for_every_role():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    for name in OPTIMIZERS:
        groups = make_optimizer(name, model, dict.fromkeys(split_by_role(model), RATE), **SETTINGS).groups
        assert [group.name for group in groups] == ["biases", "head"]  # the others have no variables
