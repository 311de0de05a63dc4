import keras
import pytest
import tensorflow as tf

from cifar_towers.towers import placement_report, run_on_towers, variable_placement
from cifar_towers.towers.placement import pin_to_device


def test_variables_go_to_the_cpu_whatever_device_is_asked_for():
    with variable_placement("cpu"), tf.device("/CPU:5"):
        plain = tf.Variable(1.0)
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    assert plain.device.endswith("CPU:0")
    assert all(v.value.device.endswith("CPU:0") for v in layer.variables)


def homes(variables):
    return [int(v.device[-1]) for v in variables]


def test_round_robin_takes_the_towers_in_turn(towers):
    with variable_placement("round_robin", towers(3)):
        layers = [keras.layers.Dense(2) for _ in range(2)]
        for layer in layers:
            layer.build((None, 3))
        variables = [v.value for layer in layers for v in layer.variables] + [tf.Variable(0.0)]
    assert homes(variables) == [0, 1, 2, 0, 1]


def test_least_loaded_counts_bytes(towers):
    with variable_placement("least_loaded", towers(3)):
        big = tf.Variable(tf.zeros([100]))  # 400 bytes on 0
        small = tf.Variable(tf.zeros([10], tf.float64))  # 80 on 1
        layer = keras.layers.Dense(5)
        layer.build((None, 30))  # 600 on 2, 20 on 1, which makes 100
        with pin_to_device(small.device):
            slot = tf.Variable(tf.zeros([60]))  # 240 beside it, which makes 340
        late = [tf.Variable(tf.zeros([n])) for n in (10, 20, 1)]  # 1 holds 380; 1 holds 460; then 0 has least
    assert homes([big, small, *(v.value for v in layer.variables), slot, *late]) == [0, 1, 2, 1, 1, 1, 1, 0]


def test_least_loaded_leaves_random_values_as_they_are(towers):
    """The first value is drawn once, so that another placement changes no run."""

    def drawn(policy):
        keras.utils.set_random_seed(3)
        with variable_placement(policy, towers(2)):
            layers = [keras.layers.Dense(2) for _ in range(2)]
            for layer in layers:
                layer.build((None, 3))
        return [layer.kernel.numpy() for layer in layers]

    for one, other in zip(drawn("cpu"), drawn("least_loaded"), strict=True):
        assert (one == other).all()


def test_least_loaded_must_know_the_bytes(towers):
    with (
        pytest.raises(ValueError, match=r"variable growing has shape \(None, 3\).* round_robin"),
        variable_placement("least_loaded", towers(2)),
    ):
        tf.Variable(tf.zeros([1, 3]), shape=tf.TensorShape([None, 3]), name="growing")


def test_pinned_variables_stay_where_they_are_pinned(towers):
    for policy in ("cpu", "round_robin"):
        with variable_placement(policy, towers(2)), pin_to_device("/CPU:3"):
            variable = tf.Variable(0.0)
            with pin_to_device("/CPU:4"):
                inner = tf.Variable(0.0)
        assert homes([variable, inner]) == [3, 4]


def test_unknown_policy(towers):
    with pytest.raises(ValueError, match="placement 'moon' is not one of cpu"), variable_placement("moon"):
        pass
    with (
        pytest.raises(ValueError, match="round_robin spreads variables over towers"),
        variable_placement("round_robin"),
    ):
        pass


def test_the_table_tells_bytes_and_devices(towers):
    with tf.device("/CPU:1"):
        v = tf.Variable(tf.zeros([10, 3]), name="v")
    step = tf.function(lambda: run_on_towers(lambda tower, _: tf.sin(v), towers(2), [0, 0]))
    table = placement_report(step.get_concrete_function(), towers(2))
    assert "v         (10, 3)    120  /CPU:1" in table
    assert "/CPU:1: 120 bytes of variables" in table
    assert "tower_1: " in table and "operations on /CPU:1" in table
