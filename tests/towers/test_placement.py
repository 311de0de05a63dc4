import dataclasses
import re

import keras
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.towers import Tower, placement_report, run_on_towers, variable_placement
from cifar_towers.towers.placement import PLACEMENTS, pin_to_device


def device_indices(variables):
    return [int(v.device[-1]) for v in variables]


def two_layers():
    layers = [keras.layers.Dense(2) for _ in range(2)]
    for layer in layers:
        layer.build((None, 3))
    return layers


@pytest.mark.parametrize(("policy", "expected"), [("cpu", [0] * 5), ("round_robin", [0, 1, 2, 0, 1])])
def test_policies_override_the_device_scope(towers, policy, expected):
    with variable_placement(policy, towers(3) if policy == "round_robin" else ()), tf.device("/CPU:5"):
        variables = [v.value for layer in two_layers() for v in layer.variables] + [tf.Variable(0.0)]
    assert device_indices(variables) == expected


def test_least_loaded_counts_bytes(towers):
    with variable_placement("least_loaded", towers(3)):
        big = tf.Variable(tf.zeros([100]))  # 400 bytes on 0
        small = tf.Variable(tf.zeros([10], tf.float64))  # 80 on 1
        layer = keras.layers.Dense(5)
        layer.build((None, 30))  # 600 on 2, 20 on 1, which makes 100
        with pin_to_device(small.device):
            slot = tf.Variable(tf.zeros([60]))  # 240 on the same device, which makes 340
        late = [tf.Variable(tf.zeros([n])) for n in (10, 20, 1)]  # 1 holds 380; 1 holds 460; then 0 has least
    assert device_indices([big, small, *(v.value for v in layer.variables), slot, *late]) == [0, 1, 2, 1, 1, 1, 1, 0]


def test_least_loaded_knows_devices_by_any_name(towers):
    renamed = [Tower(tower.index, tower.device.replace("/", "/device:")) for tower in towers(2)]
    with variable_placement("least_loaded", renamed):
        variables = [tf.Variable(0.0) for _ in range(4)]
    assert device_indices(variables) == [0, 1, 0, 1]


def test_placement_does_not_change_initial_values(towers):
    """`least_loaded` computes a random initial value once to count its bytes, and uses that value."""

    def initial_kernels(policy):
        keras.utils.set_random_seed(3)
        with variable_placement(policy, towers(2)):
            return [layer.kernel.numpy() for layer in two_layers()]

    for one, other in zip(initial_kernels("cpu"), initial_kernels("least_loaded"), strict=True):
        assert (one == other).all()


def test_pin_to_device_overrides_the_policy(towers):
    for policy in ("cpu", "round_robin"):
        with variable_placement(policy, towers(2)), pin_to_device("/CPU:3"):
            variable = tf.Variable(0.0)
            with pin_to_device("/CPU:4"):
                inner = tf.Variable(0.0)
        assert device_indices([variable, inner]) == [3, 4]


def test_the_flag_has_all_placements():
    (field,) = (field for field in dataclasses.fields(TrainConfig) if field.name == "variable_placement")
    assert field.metadata["choices"] == tuple(PLACEMENTS)


def test_a_new_placement_needs_one_entry(towers, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, "last_tower", lambda devices: lambda count_bytes, pinned_to: devices[-1])
    with variable_placement("last_tower", towers(3)):
        assert device_indices([tf.Variable(0.0), tf.Variable(1.0)]) == [2, 2]


def test_placement_report_lists_bytes_and_devices(towers):
    with tf.device("/CPU:1"):
        v = tf.Variable(tf.zeros([10, 3]), name="v")
    step = tf.function(lambda: run_on_towers(lambda tower, _: tf.sin(v), towers(2), [0, 0]))
    table = placement_report(step.get_concrete_function(), towers(2))
    assert re.search(r"^v +\(10, 3\) +120 bytes +/CPU:1$", table, re.M)
    assert "/CPU:1: 120 bytes of variables" in table
    assert "tower_1: " in table and "operations on /CPU:1" in table
