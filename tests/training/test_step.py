"""The claim the project stands on: K towers of B/K are one tower of B."""

import dataclasses
import threading
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.models import convolution
from cifar_towers.towers.placement import tower_devices
from cifar_towers.training import build
from cifar_towers.training.losses import MODEL_LOSSES
from cifar_towers.training.runner import StepInput, StepRunner
from cifar_towers.training.step import StepGradients, StepMetrics
from tests.helpers.configs import TINY_NET, net, recipe
from tests.helpers.step_runs import StepRun

STEPS = 3
RATES = {
    "learning_rate": 0.05,
    "learning_rate_schedule": "linear:0=1,100%=0",
    "momentum": 0.9,
    "nesterov": False,
}
cifarnet = partial(recipe, "cifarnet", batch_size=24, epochs=8, **RATES)


def trained(towers, examples, precision, steps, **settings):
    """Return the state after all steps, and the metrics of the last."""
    run = StepRun(towers, examples, cifarnet(**settings), precision)
    metrics = [run.step(number) for number in range(steps)]
    return run.state, metrics[-1]


@pytest.fixture(scope="module")
def witness(examples):
    """Return the weights after the steps of one plain GradientTape with momentum by hand: no
    towers, no optimizers.
    """
    config = cifarnet()
    model = build.make_model(config, "float64", CIFAR10, examples)
    augmentation = build.make_augmentation(config, CIFAR10)
    weights = [v.value for v in model.trainable_variables]
    buffers = [0.0] * len(weights)
    for number in range(STEPS):
        batch = build.make_batches(config, examples).at(number)
        images = augmentation.augment(batch.images, batch.draws)
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, logits)
            loss = tf.reduce_mean(losses)
            for layer in ("local3", "local4"):
                loss += 0.004 * tf.nn.l2_loss(model.get_layer(layer).kernel.value)
        gradients = tape.gradient(loss, weights)
        pairs = zip(buffers, gradients, strict=True)
        buffers = [0.9 * buffer + gradient for buffer, gradient in pairs]
        rate = np.float32(0.05 * (1 - number / 100)).astype("f8")
        for weight, buffer in zip(weights, buffers, strict=True):
            weight.assign_sub(rate * buffer)
    return weights


@pytest.mark.parametrize("count", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_towers_equal_an_independent_witness_in_float64(towers, examples, witness, count):
    state, _ = trained(towers(count), examples, "float64", STEPS)
    for ours, theirs in zip(state.weights, witness, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-14)


def test_metrics_are_of_all_towers_and_losses_of_the_final_one(towers, examples):
    _, metrics = trained(towers(2), examples, "float32", 1)
    assert len(set(metrics.tower_losses)) == 2
    assert metrics.losses["total_loss"] == metrics.tower_losses[-1]

    weight_loss = metrics.losses["local3/weight_loss"] + metrics.losses["local4/weight_loss"]
    mean = np.mean(metrics.tower_losses)
    assert float(metrics.loss + weight_loss) == pytest.approx(mean, rel=1e-5)


def gpu_runs(node):
    """Return whether TensorFlow has a kernel for GPUs of a node's operation and types."""
    types = {
        name: [value.type] if value.type else value.list.type for name, value in node.attr.items()
    }

    def takes_types(kernel):
        for limit in kernel.constraint:
            if not set(types[limit.name]) <= set(limit.allowed_values.list.type):
                return False
        return True

    registered = kernels.get_registered_kernels_for_op(node.op).kernel
    for_gpus = [kernel for kernel in registered if kernel.device_type in ("GPU", "DEFAULT")]
    return any(takes_types(kernel) for kernel in for_gpus)


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(), reason="TensorFlow is built without kernels for GPUs"
)
@pytest.mark.parametrize(
    ("name", "precision", "settings"),
    [
        ("speed95", "bfloat16", {"model": "speednet93"}),
        ("cifarnet", "float32", {"cutout": 4}),
        pytest.param("resnet20", "float32", {"micro_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_gpus_can_run_every_operation_of_a_tower(
    monkeypatch, towers, examples, name, precision, settings
):
    """TensorFlow runs an operation without a kernel for GPUs on the CPU, and its tensors travel in
    every step.
    """
    monkeypatch.setattr(convolution, "_on_cpu", lambda images: False)
    last = dataclasses.replace(towers(2)[1], index=0)  # not on the host's device
    config = recipe(name, batch_size=12, variable_placement="round_robin", **settings)
    run = StepRun([last], examples, config, precision)
    graph = run.traced().graph.as_graph_def()
    on_tower = [node for node in graph.node if node.device.endswith(last.device[1:])]
    inside = [node for function in graph.library.function for node in function.node_def]

    assert len(on_tower) > 300
    assert not [(node.name, node.op) for node in on_tower + inside if not gpu_runs(node)]


def test_micro_batches_hold_the_gradients_of_one_part_and_the_sum(towers, examples):
    run = StepRun(towers(1), examples, TrainConfig(model=TINY_NET, batch_size=8, micro_batches=4))
    graph = run.train_step.get_concrete_function(run.batches.at(0), run.rates()).graph
    shapes = [tuple(weight.shape) for weight in run.state.weights if weight.shape.rank > 1]
    sums = [op for op in graph.get_operations() if op.type == "AddN"]
    sums = [op for op in sums if tuple(op.outputs[0].shape) in shapes]

    assert {len(op.inputs) for op in sums} == {2}

    for part in (2, 3):  # which wait for the sum of those before
        images = graph.get_operation_by_name(f"tower_0/part_{part}/Identity")
        assert len({*sums} & {*images.control_inputs}) == len(shapes)


@pytest.mark.parametrize(
    "policy", ["least_loaded", pytest.param("round_robin", marks=pytest.mark.slow), "cpu"]
)
def test_operations_are_on_their_tower_or_beside_their_variable(towers, examples, policy):
    """Read from the graph of four towers that are on other devices than the host, as on GPUs. On
    the host are then the split of the batch and what is smaller than a vector of weights: step
    counter, metrics.
    """
    on_devices = [
        dataclasses.replace(tower, device=f"/CPU:{tower.index + 1}") for tower in towers(4)
    ]
    settings = {"model": "speednet94", "optimizer": "muon", "batch_size": 8}
    run = StepRun(on_devices, examples, TrainConfig(variable_placement=policy, **settings))
    function = run.train_step.get_concrete_function(run.batches.at(0), run.rates(0))
    made = function.graph.get_operations()
    kernels = [weight for weight in run.state.weights if weight.shape.rank == 4]
    for kind in ("Conv2D", "Conv2DBackpropInput"):
        counts = [tower_devices(function, tower, kind) for tower in on_devices]
        assert [list(of_tower) for of_tower in counts] == [[tower.device] for tower in on_devices]
        assert len({sum(of_tower.values()) for of_tower in counts}) == 1

    for group in run.state.optimizer.groups:
        devices = [variable.device for variable in group.rule.variables]
        for slots in filter(None, group.rule.slots.values()):
            assert [slot.device for slot in slots] == devices

    averaged = [op for op in made if op.type == "AddN" and op.name.startswith("average_gradients/")]

    assert [op.device[-5:] for op in averaged] == [v.device[-5:] for v in run.state.weights]

    inside = {id(outer): inner for outer, inner in function.graph.captures}
    device_of = {id(inside[id(v.handle)]): v.device[-5:] for v in function.variables}
    updates = [op for op in made if op.type in ("AssignSubVariableOp", "AssignVariableOp")]
    moved = [op for op in updates if id(op.inputs[0]) in device_of]

    assert len(moved) >= len(run.state.weights)
    assert all(op.device[-5:] == device_of[id(op.inputs[0])] for op in moved)

    def is_large(op):
        sizes = [output.shape.num_elements() for output in op.outputs]
        return any(size is not None and size > 100 for size in sizes)

    scopes = ("average_gradients", "average_statistics", "apply")
    large = [op for op in made if op.name.split("/")[0] in scopes and is_large(op)]

    muon_products = [op for op in large if op.type == "MatMul"]
    assert len(muon_products) == 11 * len(kernels)

    used = {op.device[-5:] for op in large} - {""}
    if policy == "cpu":
        assert used == {"CPU:0"}
    else:
        assert used == {tower.device[-5:] for tower in on_devices}
    # which is where the variable is
    assert {op.type for op in large if not op.device} <= {"Const", "ReadVariableOp"}


def test_the_whitening_is_not_trained(towers, examples):
    run = StepRun(towers(2), examples, cifarnet(model="speednet93", crop=20))
    layer = run.state.model.get_layer("whitening")
    before = layer.get_weights()
    assert bool(run.step(0).updated)

    for old, new in zip(before, layer.get_weights(), strict=True):
        assert np.abs(old).min() > 0
        np.testing.assert_array_equal(old, new)


def test_dropout_depends_on_the_position_in_the_batch(towers, examples):
    """It is other pixels on each tower, and the same ones when one tower takes the shards of two as
    micro-batches.
    """
    settings = {"model": net("dropping"), "crop": 0, "learning_rate": 1e-4}
    settings |= {"flip": "none", "brightness": 0.0, "contrast": 0.0}
    alike = examples.take(np.zeros(48, int))  # one image, so that only what is dropped differs
    two, metrics = trained(towers(2), alike, "float64", 2, **settings)
    one, _ = trained(towers(1), alike, "float64", 2, **settings, micro_batches=2)

    assert abs(np.ptp(metrics.tower_losses)) > 1e-6

    for ours, theirs in zip(one.weights, two.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-14)


def test_model_losses_are_added_once(towers, examples):
    """Whatever the number of towers and parts: L2's term is 1e-3 w^2, its gradient 2e-3 w."""
    settings = {"crop": 0, "momentum": 0.0, "micro_batches": 2}
    config = cifarnet(model=net("regularized"), **settings)
    model = build.make_model(config, "float64", CIFAR10, examples)
    kernel = model.trainable_variables[0].numpy()
    train = partial(trained, towers(2), examples, "float64", 1, **settings)
    with_loss, metrics = train(model=net("regularized"))
    without, _ = train(model=net("plain"))

    assert float(metrics.losses[MODEL_LOSSES]) == pytest.approx(1e-3 * np.sum(kernel**2))

    further = without.weights[0].numpy() - with_loss.weights[0].numpy()
    np.testing.assert_allclose(further, np.float32(0.05) * 2e-3 * kernel, rtol=1e-6)


def test_a_step_of_cifarnet_is_that_of_earlier_versions(towers):
    """In float64, from the weights of seed 0: a run goes on with it after an update."""
    config = recipe("cifarnet", batch_size=12)
    run = StepRun(towers(1), synthetic.make(60, 0, 0), config, precision="float64")
    metrics = run.step(0)
    values = run.values("model.")
    found = [
        metrics.loss,
        metrics.losses["total_loss"],
        metrics.gradient_norm,
        np.abs(values["conv1.kernel"]).sum(),
        values["local3.bias"].sum(),
    ]
    known = [2.289426093184582, 4.662751543878436, 2.2561215874566276]
    known += [172.53802811436205, 38.4008983229362]

    np.testing.assert_allclose(found, known, rtol=1e-7)  # images are float32


def test_steps_of_a_speednet_are_those_of_earlier_versions(towers):
    """Whitening, Muon, Nesterov momentum, a moving average and, after the fifth step, slow weights;
    in float32, as the fused batch norm has no float64.
    """
    # low rates, at which rounding does not grow
    settings = {"batch_size": 12, "nesterov": True, "ema_decay": 0.9}
    settings |= {"learning_rate_schedule": "step:0=0.05"}
    config = recipe("speed95", model="speednet93", **settings)
    run = StepRun(towers(1), synthetic.make(60, 0, 0), config)
    for number in range(5):
        metrics = run.step(number)

    values = run.values()
    names = ["model.head.kernel", "ema.head.kernel", "lookahead.group1_conv1.kernel"]
    names += ["model.group1_norm1.beta", "model.whitening.kernel"]
    names += ["optimizer.kernels.momentum.0", "optimizer.biases.momentum.0"]
    found = [metrics.loss, *(np.abs(values[name]).sum() for name in names)]
    known = [2.287786, 57.30305, 57.27064, 424.4949, 1.448569, 194.7424, 73.02170, 0.08705842]
    np.testing.assert_allclose(found, known, rtol=1e-4)


def test_a_step_runs_while_the_host_goes_on(request):
    """An error in it is raised by the call that reads its metrics, and by every later one."""
    allowed = threading.Event()

    @tf.function
    def train_step(batch, **_):
        tf.debugging.assert_equal(batch, 0)
        loss = tf.numpy_function(lambda: np.float32(allowed.wait(60)), [], tf.float32)
        return StepMetrics(loss, *[None] * 5), StepGradients([], [])

    runner = StepRunner(train_step)
    request.addfinalizer(runner.close)
    inputs = [StepInput(step, tf.constant(step), {}, 24) for step in range(3)]
    runner.trace(inputs[0])

    assert runner.start(inputs[0], keep_gradients=False) == []

    allowed.set()
    assert [(finished.step, finished.metrics.loss) for finished in runner.finish()] == [(1, 1.0)]
    assert runner.is_up_to_date

    runner.start(inputs[1], keep_gradients=False)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            runner.finish()
    with pytest.raises(tf.errors.InvalidArgumentError):
        runner.start(inputs[2], keep_gradients=False)
