from collections import Counter

import pytest
from tensorflow.python.eager import context  # the partitioned graphs of a call have no public way out

from cifar_towers.config import TrainConfig
from tests.scripts.transfers import transfers
from tests.training.runs import Run


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
