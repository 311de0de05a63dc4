from collections import Counter

import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # the partitioned graphs of a call have no public way out

from cifar_towers.config import TrainConfig
from tests.scripts.transfers import transfers
from tests.training.runs import Run


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


@pytest.mark.parametrize(
    "settings",
    [
        {"variable_placement": "least_loaded"},
        pytest.param({"variable_placement": "round_robin", "batch_statistics": "synchronized"}, marks=pytest.mark.slow),
        pytest.param({"parallelism": "model"}, marks=pytest.mark.slow),
    ],
)
def test_traced_bytes_equal_those_that_tensorflow_sends(towers, examples, settings):
    """TensorFlow partitions a call into one graph a device; the witness is the sum over all `_Send` operations."""
    config = TrainConfig(model="resnet20", flip="random", crop=0, batch_size=12, whitening_images=20, **settings)
    run = Run(towers(2), examples, config)
    arguments, step = (run.batches.at(0), run.rates(rate=0.1)), run.train_step
    function = step.get_concrete_function(*arguments)
    sent = sent_bytes(lambda: step(*arguments), function.graph)
    assert len(sent) == 2
    assert transfers(function, scalars=False) == sent


def sent_bytes(call, graph):
    context.context().enable_run_metadata()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    sent = Counter()
    operations = {op.name: op for op in graph.get_operations()}
    for node in (node for partition in metadata.partition_graphs for node in partition.node if node.op == "_Send"):
        name, _, index = node.input[0].partition(":")
        if name not in operations:  # a control edge, or a scalar that was folded
            continue
        tensor = operations[name].outputs[int(index or 0)]
        ends = ("/" + node.attr[end].s.decode().rsplit("device:")[-1] for end in ("send_device", "recv_device"))
        if tensor.shape.rank:
            sent[tuple(ends)] += tensor.shape.num_elements() * tensor.dtype.size
    return sent
