import dataclasses
import math
import re
from collections import Counter

import keras
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.towers import Tower, placement_report, run_on_towers, variable_placement
from cifar_towers.towers.placement import PLACEMENTS, pin_to_device, short_device
from cifar_towers.training import build
from cifar_towers.training.optimizers import make_optimizer
from tests.helpers.configs import recipe


def device_indices(variables):
    return [int(v.device[-1]) for v in variables]


@pytest.mark.parametrize(
    ("policy", "expected"), [("cpu", [0] * 5), ("round_robin", [0, 1, 2, 0, 1])]
)
def test_policies_override_the_device_scope(towers, policy, expected):
    layers = [keras.layers.Dense(2) for _ in range(2)]
    used = towers(3) if policy == "round_robin" else ()
    variables = []
    with variable_placement(policy, used), tf.device("/CPU:5"):
        for layer in layers:
            layer.build((None, 3))
            variables += [variable.value for variable in layer.variables]
        variables.append(tf.Variable(0.0))

    assert device_indices(variables) == expected


def test_least_loaded_counts_bytes(towers):
    by_another_name = [
        Tower(tower.index, tower.device.replace("/", "/device:")) for tower in towers(3)
    ]
    with variable_placement("least_loaded", by_another_name):
        big = tf.Variable(tf.zeros([100]))  # 400 bytes on 0
        small = tf.Variable(tf.zeros([10], tf.float64))  # 80 on 1
        layer = keras.layers.Dense(5)
        layer.build((None, 30))  # 600 on 2, 20 on 1, which makes 100
        with pin_to_device(small.device):
            slot = tf.Variable(tf.zeros([60]))  # 240 on the same device, which makes 340
        # 1 holds 380; 1 holds 460; then 0 has least
        late = [tf.Variable(tf.zeros([n])) for n in (10, 20, 1)]

    of_layer = [variable.value for variable in layer.variables]
    variables = [big, small, *of_layer, slot, *late]
    assert device_indices(variables) == [0, 1, 2, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_policies_that_spread_variables_need_towers(policy):
    with pytest.raises(ValueError, match=f"{policy}.*needs the towers"):
        variable_placement(policy)


def test_the_flag_has_all_placements():
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    field = fields["variable_placement"]
    assert field.metadata["choices"] == tuple(PLACEMENTS)


@pytest.mark.parametrize(
    ("settings", "policy", "devices"),
    [
        ({"model": "cifarnet"}, "cpu", ["/GPU:0", "/GPU:1"]),
        ({"model": "cifarnet", "jit_compile": True}, "round_robin", ["/GPU:0"]),
        ({"model": "speednet94"}, "least_loaded", ["/GPU:0", "/GPU:1"]),
        ({"variable_placement": "least_loaded"}, "least_loaded", ["/GPU:0", "/GPU:1"]),
    ],
)
def test_variables_are_on_gpus_by_default_if_their_update_is_large_or_compiled(
    monkeypatch, settings, policy, devices
):
    placed = []
    monkeypatch.setattr(build, "variable_placement", lambda *arguments: placed.append(arguments))
    build.place_variables(TrainConfig(**settings), [Tower(0, "/GPU:0"), Tower(1, "/GPU:1")])
    ((used, towers),) = placed
    assert (used, [tower.device for tower in towers]) == (policy, devices)


@pytest.mark.parametrize("name", ["speed94", "cifarnet", "resnet20"])
def test_least_loaded_spreads_the_bytes_of_weights_and_slots(towers, name):
    """The fullest device has at most 1.5 times the mean, or hardly more than a single weight with
    its slots.
    """
    config = recipe(name)
    for count in (2, 3, 4, 8):
        with variable_placement("least_loaded", towers(count)):
            model = build.make_model(config, "float32", CIFAR10)
            optimizer = make_optimizer(config, model, RunLength(10, 100, 100))
            weights = [variable.value for variable in model.variables]
        bytes_on = Counter()
        bytes_of_shape = Counter()
        for variable in [*weights, *optimizer.slots().values()]:
            size = math.prod(variable.shape) * variable.dtype.size
            bytes_on[short_device(variable.device)] += size
            bytes_of_shape[tuple(variable.shape)] += size
        shapes = Counter(tuple(weight.shape) for weight in weights)
        largest = max(bytes_of_shape[shape] / number for shape, number in shapes.items())
        mean = sum(bytes_on.values()) / count
        assert max(bytes_on.values()) <= max(1.5 * mean, 1.01 * largest), (count, bytes_on)


def test_placement_report_lists_bytes_and_devices(towers):
    with tf.device("/CPU:1"):
        v = tf.Variable(tf.zeros([10, 3]), name="v")
    step = tf.function(lambda: run_on_towers(lambda tower, _: tf.sin(v), towers(2), [0, 0]))
    table = placement_report(step.get_concrete_function(), towers(2))
    assert re.search(r"^v .*\(10, 3\).* 120 .*/CPU:1$", table, re.M)
    assert re.search(r"^tower_1: .*/CPU:1$", table, re.M)
