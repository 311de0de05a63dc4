"""The claim the project stands on: K towers of B/K are one tower of B."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.errors import UsageError
from cifar_towers.models import convolution
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import tower_devices
from cifar_towers.training import build
from cifar_towers.training.losses import OWN
from tests import operations
from tests.configs import TINY_NET, net, recipe
from tests.training.runs import Run

RATES = {"learning_rate": 0.05, "learning_rate_schedule": "linear:0=1,100%=0", "momentum": 0.9, "ema_decay": 0.99}
cifarnet = partial(recipe, "cifarnet", batch_size=24, epochs=8, max_steps=0, **RATES)


def trained(towers, examples, precision, steps, **settings):
    """Return the state after all steps, and the metrics of the last."""
    run = Run(towers, examples, cifarnet(**settings), precision)
    metrics = [run.step(number) for number in range(steps)]
    return run.state, metrics[-1]


def largest_difference(one, other):
    """Compare weights, averages and slots, relative to the largest of each; loss averages are the final tower's."""
    there = other.named_variables()
    differences = {
        name: np.max(np.abs(v - there[name])) / max(np.max(np.abs(v)), 1e-30)
        for name, v in one.named_variables().items()
        if v.dtype.is_floating and not name.startswith("loss_average")
    }
    return max(differences.values())


@pytest.fixture(scope="module")
def one_tower(towers, examples):
    """One tower after five steps in float64."""
    return trained(towers(1), examples, "float64", 5)[0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_towers_equal_one_tower_in_float64(towers, examples, one_tower, count):
    many, _ = trained(towers(count), examples, "float64", 5)
    difference = largest_difference(one_tower, many)
    print(f"cifarnet, float64, 5 steps, 1 tower against {count}: largest relative difference {difference:.1e}")
    assert difference < 1e-11


def test_synchronized_norms_of_keras_equal_one_tower(towers, examples):
    settings = {"model": net("synchronized"), "batch_statistics": "synchronized"}
    one = trained(towers(1), examples, "float32", 2, **settings)[0]
    for strategy in ("towers", "mirrored"):
        two = trained(towers(2), examples, "float32", 2, strategy=strategy, **settings)[0]
        assert largest_difference(one, two) < 1e-4


def test_an_independent_witness(towers, examples):
    """Two towers against one plain GradientTape and hand-written SGD, no code of towers or optimizers in it."""
    settings = {"momentum": 0.0, "brightness": 0.0, "contrast": 0.0, "ema_decay": 0.0}
    state, _ = trained(towers(2), examples, "float64", 3, **settings)
    config = cifarnet(**settings)
    model = build.make_model(config, "float64", CIFAR10)
    batches = build.make_batches(config, examples)
    for number in range(3):
        batch = batches.at(number)
        images = build.make_augmentation(config, CIFAR10).augment(batch.images, batch.draws)
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, logits))
            for layer in ("local3", "local4"):
                loss += 0.004 * tf.nn.l2_loss(model.get_layer(layer).kernel.value)
        variables = [v.value for v in model.trainable_variables]
        rate = 0.05 * (1 - number / 100)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(np.float32(rate).astype("f8") * gradient)
    for ours, theirs in zip(state.weights, variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-14)


def test_metrics_are_of_all_towers_and_losses_of_the_final_one(towers, examples):
    _, metrics = trained(towers(4), examples, "float32", 1)
    assert metrics.tower_losses.shape == (4,)
    assert len(set(metrics.tower_losses)) == 4
    assert metrics.losses["total_loss"] == metrics.tower_losses[-1]
    weight_loss = metrics.losses["local3/weight_loss"] + metrics.losses["local4/weight_loss"]
    assert float(metrics.loss + weight_loss) == pytest.approx(np.mean(metrics.tower_losses), rel=1e-5)
    assert float(metrics.smoothed_losses["total_loss"]) == pytest.approx(float(metrics.losses["total_loss"]))


def expected_devices(policy, variables):
    """Return the devices of four that variables have which are created in this order."""
    held, devices = [0] * 4, []
    for index, v in enumerate(variables):
        device = {"cpu": 0, "round_robin": index % 4, "least_loaded": held.index(min(held))}[policy]
        held[device] += v.shape.num_elements() * v.dtype.size
        devices.append(f"CPU:{device}")
    return devices


ONCE_EACH = {"cifarnet": "least_loaded", "speednet93": "round_robin", "resnet20": "cpu"}
PAIRS = itertools.product(ONCE_EACH, ("least_loaded", "round_robin", "cpu"))


@pytest.mark.parametrize(
    ("model", "policy"),
    [pytest.param(*pair, marks=() if pair in ONCE_EACH.items() else pytest.mark.slow) for pair in PAIRS],
)
def test_operations_and_variables_are_on_their_devices(monkeypatch, towers, examples, model, policy):
    """Read from the traced graph of four devices: variables, forward, backward, averaging, updates."""
    monkeypatch.setattr(convolution, "processor_features", lambda: {"avx2", "avx512f"})
    crop = 24 if model == "cifarnet" else 0
    settings = {"model": model, "crop": crop, "batch_size": 8, "whitening_images": 20, "whitening_epochs": 1}
    run = Run(towers(4), examples, TrainConfig(variable_placement=policy, **settings))
    state = run.state
    function = run.train_step.get_concrete_function(run.batches.at(0), run.rates(0, 0.1))
    made = function.graph.get_operations()

    # by Winograd's algorithm: three of 128 filters of 128 channels; two other gradients to images are convolutions
    whitening, turned, products = (1, 2, 3) if model == "speednet93" else (0, 0, 0)
    kernels = len([w for w in state.weights if w.shape.rank == 4]) - products
    for tower in towers(4):
        assert tower_devices(function, tower, "BatchMatMulV2") == ({tower.device: 3 * products} if products else {})
        assert tower_devices(function, tower, "Conv2D") == {tower.device: kernels + whitening + turned}
        backward = tower_devices(function, tower, "Conv2DBackpropInput")
        assert set(backward) == {tower.device} and backward[tower.device] >= kernels - turned

    created = [v.value for layer in state.model.layers for v in layer.variables]
    assert [v.device[-5:] for v in created] == expected_devices(policy, created)
    slots = [
        slot
        for group in state.optimizer.groups
        for slot in zip(group.rule.variables, *group.rule.slots.values(), strict=True)
    ]
    assert all(slot.device == variable.device for variable, *of_one in slots for slot in of_one)

    averaged = [op for op in made if op.type == "AddN" and op.name.startswith("average_gradients/")]
    assert [op.device[-5:] for op in averaged] == [v.device[-5:] for v in state.weights]
    inside = {id(outer): inner for outer, inner in function.graph.captures}
    device_of = {id(inside[id(v.handle)]): v.device[-5:] for v in function.variables}
    updates = [op for op in made if op.type in ("AssignSubVariableOp", "AssignVariableOp")]
    moved = [op for op in updates if id(op.inputs[0]) in device_of]
    assert len(moved) >= len(state.weights)
    assert all(op.device[-5:] == device_of[id(op.inputs[0])] for op in moved)


def gpu_runs(node):
    """Whether TensorFlow has a kernel for GPUs of a node's operation and types."""
    types = {name: [value.type] if value.type else value.list.type for name, value in node.attr.items()}
    return any(
        all(set(types[limit.name]) <= set(limit.allowed_values.list.type) for limit in kernel.constraint)
        for kernel in kernels.get_registered_kernels_for_op(node.op).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
    )


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="TensorFlow is built without kernels for GPUs")
@pytest.mark.parametrize(
    ("name", "precision", "settings"),
    [
        ("speed96", "bfloat16", {"hard_example_pool": 24, "whitening_images": 60}),
        ("cifarnet", "float32", {"cutout": 4}),
        ("resnet20", "float32", {"micro_batches": 2}),
    ],
)
def test_gpus_can_run_every_operation_of_a_tower(towers, examples, name, precision, settings):
    """TensorFlow runs an operation without a kernel for GPUs on the CPU, and its tensors travel in every step."""
    last = dataclasses.replace(towers(2)[1], index=0)  # not on the host's device
    run = Run([last], examples, recipe(name, batch_size=12, variable_placement="round_robin", **settings), precision)
    graph = run.train_step.get_concrete_function(run.batches.at(0), run.rates()).graph.as_graph_def()
    inside = [node for function in graph.library.function for node in function.node_def]
    on_tower = [node for node in graph.node if node.device.endswith(last.device[1:])]
    assert len(on_tower) > 300
    assert not [(node.name, node.op) for node in on_tower + inside if not gpu_runs(node)]


def test_micro_batches_hold_the_gradients_of_one_part_and_the_sum(towers, examples):
    run = Run(towers(1), examples, TrainConfig(model=TINY_NET, batch_size=8, micro_batches=4))
    graph = run.train_step.get_concrete_function(run.batches.at(0), run.rates()).graph
    shapes = [tuple(weight.shape) for weight in run.state.weights if weight.shape.rank > 1]
    sums = [op for op in graph.get_operations() if op.type == "AddN" and tuple(op.outputs[0].shape) in shapes]
    assert {len(op.inputs) for op in sums} == {2}
    for part in (2, 3):  # which wait for the sum of those before
        (images,) = (op for op in graph.get_operations() if op.name == f"tower_0/part_{part}/Identity")
        assert len({*sums} & {*images.control_inputs}) == len(shapes)


@pytest.mark.parametrize("policy", ["least_loaded", pytest.param("round_robin", marks=pytest.mark.slow), "cpu"])
def test_updates_norms_and_newton_schulz_products_are_beside_their_variables(towers, examples, policy):
    """Read from the graph of four towers that are on other devices than the host, as on GPUs. On the host are then the
    split of the batch and what is smaller than a vector of weights: step counter, smoothed losses, metrics."""
    on_devices = [dataclasses.replace(tower, device=f"/CPU:{tower.index + 1}") for tower in towers(4)]
    settings = {"model": "speednet94", "optimizer": "muon", "batch_size": 8, "whitening_images": 50}
    run = Run(on_devices, examples, TrainConfig(variable_placement=policy, **settings))
    function = run.train_step.get_concrete_function(run.batches.at(0), run.rates(0))
    large = [
        op
        for op in function.graph.get_operations()
        if op.name.split("/")[0] in ("average_gradients", "average_statistics", "global_norm", "apply")
        and any(output.shape.num_elements() is not None and output.shape.num_elements() > 100 for output in op.outputs)
    ]
    products = [op for op in large if op.type == "MatMul"]
    kernels = [weight for weight in run.state.weights if weight.shape.rank == 4]
    assert len(products) >= 3 * 3 * len(kernels)  # three of each of the three Newton-Schulz steps
    used = {op.device[-5:] for op in large} - {""}
    assert used == {"CPU:0"} if policy == "cpu" else used == {tower.device[-5:] for tower in on_devices}
    assert {op.type for op in large if not op.device} <= {"Const", "ReadVariableOp"}  # which is where the variable is


@pytest.mark.parametrize("strategy", ["towers", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_frozen_groups_get_no_gradient_and_change_nothing_else(towers, examples, strategy):
    """After its epochs the whitening's bias rests, and the backward pass ends at the convolution after it."""
    settings = {"model": "speednet_proxy", "crop": 0, "whitening_images": 200, "whitening_epochs": 0.1}
    config = cifarnet(**settings, strategy=strategy)
    filters = build.make_model(config, "float32", CIFAR10, examples).get_layer("whitening").kernel.numpy()
    weights, backward = [], []
    for rests in (False, True):
        run = Run(towers(2), examples, config)
        assert "whitening" in run.rates(1) and "whitening" not in run.rates(2)
        rates = run.rates(2)
        if not rests:
            rates["whitening"] = tf.constant(0.0)
        backward.append(operations.count(run.train_step.get_concrete_function(run.batches.at(2), rates)))
        assert bool(run.step(2, rates=rates).updated)
        weights.append([weight.numpy() for weight in run.state.weights])
        np.testing.assert_array_equal(run.state.model.get_layer("whitening").kernel, filters)  # frozen all along
    assert backward[0] > backward[1]
    for moved, rested in zip(*weights, strict=True):
        np.testing.assert_array_equal(moved, rested)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(towers, examples):
    first, again, other = (
        trained(towers(2), examples, "bfloat16", 2, seed=seed)[0].weights_sha256() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_dropout_depends_on_the_position_in_the_batch(towers, examples):
    """It is other pixels on each tower, and the same ones when one tower takes the shards of two as micro-batches."""
    settings = {"model": net("dropping"), "crop": 0, "learning_rate": 1e-4}
    settings |= {"flip": "none", "brightness": 0.0, "contrast": 0.0}
    alike = examples.take(np.zeros(48, int))  # one image, so that only what is dropped differs
    two, metrics = trained(towers(2), alike, "float64", 2, **settings)
    one, _ = trained(towers(1), alike, "float64", 2, **settings, micro_batches=2)
    assert abs(np.ptp(metrics.tower_losses)) > 1e-6
    assert largest_difference(one, two) < 1e-11


def test_model_losses_are_added_once(towers, examples):
    """Whatever the number of towers and parts: L2's term is 1e-3 w^2, its gradient 2e-3 w."""
    settings = {"crop": 0, "momentum": 0.0, "ema_decay": 0.0, "micro_batches": 2}
    model = build.make_model(cifarnet(model=net("regularized"), **settings), "float64", CIFAR10)
    kernel = model.trainable_variables[0].numpy()
    (with_loss, metrics), (without, _) = (
        trained(towers(2), examples, "float64", 1, model=net(name), **settings) for name in ("regularized", "plain")
    )
    assert float(metrics.losses[OWN]) == pytest.approx(1e-3 * np.sum(kernel**2))
    further = without.weights[0].numpy() - with_loss.weights[0].numpy()
    np.testing.assert_allclose(further, np.float32(0.05) * 2e-3 * kernel, rtol=1e-6)


def test_more_stages_than_layers_is_a_usage_error(examples):
    config = cifarnet(strategy="stages")
    devices = [Tower(index, "/CPU:0") for index in range(11)]
    with pytest.raises(UsageError, match="11 stages.* cifarnet .*10"):
        build.make_training(config, devices, "float32", examples, RunLength(10, 10, 10))
