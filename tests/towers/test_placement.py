import keras
import pytest
import tensorflow as tf

from cifar_towers.towers import device_table, run_on_towers, variable_placement


def test_variables_go_to_the_cpu_whatever_device_is_asked_for():
    with variable_placement("cpu"), tf.device("/CPU:5"):
        plain = tf.Variable(1.0)
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    assert plain.device.endswith("CPU:0")
    assert all(v.value.device.endswith("CPU:0") for v in layer.variables)


def test_unknown_policy():
    with pytest.raises(ValueError, match="placement 'moon' is not one of cpu"), variable_placement("moon"):
        pass


def test_the_table_tells_bytes_and_devices(towers):
    with tf.device("/CPU:1"):
        v = tf.Variable(tf.zeros([10, 3]), name="v")
    step = tf.function(lambda: run_on_towers(lambda tower, _: tf.sin(v), towers(2), [0, 0]))
    table = device_table(step.get_concrete_function(), towers(2))
    assert "v         (10, 3)    120  /CPU:1" in table
    assert "/CPU:1: 120 bytes of variables" in table
    assert "tower_1: " in table and "operations on /CPU:1" in table
