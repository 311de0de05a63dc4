import pytest
import tensorflow as tf

from tests.towers.transfers import transfers


def test_each_tensor_is_sent_once_to_each_device():
    with tf.device("/CPU:2"):
        weight = tf.Variable(tf.ones([5]))

    @tf.function(autograph=False)
    def step(x):  # an argument: on the host
        with tf.device("/CPU:1"):
            y = x * weight + tf.reduce_sum(x)  # x is sent once for two uses, the weight from its device
            weight + 1.0  # not needed
        with tf.device("/CPU:3"):
            z = tf.reduce_sum(y)
        weight.assign_add(y)
        return z + 1.0  # without a device: on the host, to which a scalar returns

    function = step.get_concrete_function(tf.TensorSpec([5]))
    tensors = {("/CPU:0", "/CPU:1"): 20, ("/CPU:2", "/CPU:1"): 20, ("/CPU:1", "/CPU:3"): 20, ("/CPU:1", "/CPU:2"): 20}
    assert transfers(function, scalars=False) == tensors
    assert transfers(function) == tensors | {("/CPU:3", "/CPU:0"): 4}
    assert transfers(function, default="/CPU:3") == tensors


def test_nested_functions_run_on_the_device_of_the_call():
    @tf.function(autograph=False)
    def inner(x):
        return x + 1.0

    @tf.function(autograph=False)
    def step(x):
        with tf.device("/CPU:1"):
            return inner(x)

    assert transfers(step.get_concrete_function(tf.TensorSpec([3]))) == {("/CPU:0", "/CPU:1"): 12}


def test_unknown_sizes_and_devices_are_errors():
    @tf.function(autograph=False)
    def of_any_size(x):
        with tf.device("/CPU:1"):
            return x + 1.0

    @tf.function(autograph=False)
    def conditional(x):
        return tf.cond(x > 0, lambda: x + 1.0, lambda: x)

    with pytest.raises(ValueError, match=r"float32 \(None,\), is sent, and its size is unknown"):
        transfers(of_any_size.get_concrete_function(tf.TensorSpec([None])))
    with pytest.raises(ValueError, match=r"cond .* has no device"):
        transfers(conditional.get_concrete_function(tf.TensorSpec([])))
