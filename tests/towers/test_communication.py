"""Predicted bytes against arithmetic, traced steps and what TensorFlow sends; predicted times against arithmetic."""

import itertools
from collections import Counter

import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # the partitioned graphs of a call have no public way out

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data import synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.towers.communication import StepBytes, VariableBytes, link_loads, predict, step_bytes
from cifar_towers.towers.placement import PLACEMENTS
from cifar_towers.training import build
from tests.towers.transfers import transfers

EXAMPLE_BYTES = 32 * 32 * 3 + 8 + 1 + 2 * 4  # image, label, flip and window; nothing else is random here
BATCH = 10  # not divisible by four towers
NET = [VariableBytes(100), VariableBytes(20, "statistic"), VariableBytes(60), VariableBytes(8, "frozen")]
GPUS = ("/GPU:0", "/GPU:1")


@pytest.fixture(scope="module")
def examples():
    return synthetic.make(480, 0, 0)


def traced(towers, examples, **settings):
    """(state, function without arguments that makes a step, the same as traced) of one configuration."""
    crop = 24 if settings["model"] == "cifarnet" else 0
    settings = {"shift": 2, "flip": "random", "brightness": 0.0, "contrast": 0.0, "cutout": 0} | settings
    config = TrainConfig(**{"crop": crop, "batch_size": BATCH, "whitening_images": 20} | settings)
    batches = Batches(examples, BATCH, 0)
    state, step, _ = build.make_training(
        config, towers, "float32", examples, RunLength(batches.steps_per_epoch, 10, 10)
    )
    arguments = batches.at(0), {name: tf.constant(0.1) for name in state.optimizer.learning_rates(0)}
    return state, lambda: step(*arguments), step.get_concrete_function(*arguments)


def variables_of(model):
    """The model's variables in the order of creation, layer by layer."""
    role_of = {id(v): "weight" for v in model.trainable_variables}
    role_of |= {id(v): "frozen" for layer in model.layers if layer.name == "whitening" for v in layer.weights[:1]}
    created = [v for layer in model.layers for v in layer.variables]
    return [VariableBytes(v.value.shape.num_elements() * 4, role_of.get(id(v), "statistic")) for v in created]


SETUPS = [*itertools.product(("cifarnet", "resnet20"), PLACEMENTS, (2, 4))]
QUICK = [("cifarnet", placement, 4) for placement in PLACEMENTS] + [("resnet20", "least_loaded", 2)]


@pytest.mark.parametrize(
    ("model", "placement", "count"), [pytest.param(*s, marks=() if s in QUICK else pytest.mark.slow) for s in SETUPS]
)
def test_predicted_bytes_equal_those_of_a_traced_step(towers, examples, model, placement, count):
    state, _, function = traced(towers(count), examples, model=model, variable_placement=placement)
    devices = [tower.device for tower in towers(count)]
    expected = step_bytes(variables_of(state.model), placement, devices, BATCH, EXAMPLE_BYTES).total()
    assert transfers(function, scalars=False) == expected
    scalars = (transfers(function) - expected).total()
    assert 0 < scalars <= 4 * count * (len(state.weights) + 20)  # norms of gradients, losses, rates


@pytest.mark.parametrize("settings", [{"gradient_device": "cpu"}, {"micro_batches": 2}, {"model": "speednet93"}])
def test_predicted_bytes_with_other_settings(towers, examples, settings):
    settings = {"model": "resnet20", "variable_placement": "round_robin"} | settings
    state, _, function = traced(towers(2), examples, **settings)
    device = "/CPU:0" if "gradient_device" in settings else ""
    net, devices = variables_of(state.model), [tower.device for tower in towers(2)]
    expected = step_bytes(net, "round_robin", devices, BATCH, EXAMPLE_BYTES, gradient_device=device)
    assert bool(expected.scatter) == bool(device)
    assert transfers(function, scalars=False) == expected.total()


def test_predicted_bytes_with_mirrored_variables(towers, examples):
    state, _, function = traced(towers(4), examples, model="cifarnet", strategy="mirrored", all_reduce="one_device")
    devices = [tower.device for tower in towers(4)]
    expected = step_bytes(variables_of(state.model), "one_device", devices, BATCH, EXAMPLE_BYTES)
    # [4, n] float32 of losses, correct, nonfinite and stop signal, needed on the first device
    metrics_bytes = 4 * 4 * (len(state.loss_averages.sums) + 2)
    rest = transfers(function, scalars=False) - expected.total()
    assert rest == {(device, devices[0]): metrics_bytes for device in devices[1:]}


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
    _, step, function = traced(towers(2), examples, model="resnet20", **settings)
    sent = sent_bytes(step, function.graph)
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


def test_bytes_of_shared_variables():
    """A step of NET on two GPUs: 180 + 8 bytes are read, 180 returned; batches of 3 examples of 10 bytes."""
    host = step_bytes(NET, "cpu", GPUS, 3, 10)
    assert host.read == {("/CPU:0", "/GPU:0"): 188 + 20, ("/CPU:0", "/GPU:1"): 188 + 10}
    assert host.gather == {("/GPU:0", "/CPU:0"): 180, ("/GPU:1", "/CPU:0"): 180}
    assert host.scatter == {}
    assert link_loads(host.total()) == {"/CPU:0": (406, 360), "/GPU:0": (180, 208), "/GPU:1": (180, 198)}

    sequential = step_bytes(NET, "round_robin", GPUS)  # 100 and 60 on the first, 20 and 8 on the second
    assert sequential.read == {("/GPU:0", "/GPU:1"): 160, ("/GPU:1", "/GPU:0"): 28}
    assert sequential.gather == {("/GPU:1", "/GPU:0"): 160, ("/GPU:0", "/GPU:1"): 20}

    balanced = step_bytes(NET, "least_loaded", GPUS)  # 100 on the first; 20, 60 and 8 on the second
    assert balanced.read == {("/GPU:0", "/GPU:1"): 100, ("/GPU:1", "/GPU:0"): 88}
    assert balanced.gather == {("/GPU:1", "/GPU:0"): 100, ("/GPU:0", "/GPU:1"): 80}


def test_no_bytes_to_the_host_where_it_is_a_tower():
    on_host = step_bytes(NET, "cpu", ["/CPU:0", "/CPU:1"], 4, 10)
    assert on_host == StepBytes({("/CPU:0", "/CPU:1"): 188 + 20}, {("/CPU:1", "/CPU:0"): 180}, {})


def test_bytes_of_gradients_averaged_on_the_host():
    step = step_bytes(NET, "round_robin", GPUS, gradient_device="/CPU:0")
    assert step.gather == {("/GPU:0", "/CPU:0"): 160, ("/GPU:1", "/CPU:0"): 160, ("/GPU:0", "/GPU:1"): 20}
    assert step.scatter == {("/CPU:0", "/GPU:0"): 160}
    assert step_bytes(NET, "round_robin", GPUS[:1], gradient_device="/CPU:0").total() == {}  # nothing to average


def test_bytes_of_mirrored_variables():
    four = [f"/GPU:{index}" for index in range(4)]
    star = step_bytes(NET, "one_device", four)
    assert star.gather == {(gpu, "/GPU:0"): 180 for gpu in four[1:]}
    assert star.scatter == {("/GPU:0", gpu): 180 for gpu in four[1:]}
    ring = step_bytes(NET, "ring", four)
    assert ring.gather == ring.scatter == {(four[k], four[(k + 1) % 4]): 135 for k in range(4)}
    assert set(link_loads(ring.total()).values()) == {(270, 270)}  # 2 x 3/4 x 180
    assert step_bytes(NET, "ring", four[:1]).total() == {}


def test_step_times():
    """One weight of 10^6 bytes, 100 examples of 10^4, at 1 GB/s: a millisecond for each of the two."""
    settings = {"compute_seconds": 0.008, "variables": [VariableBytes(10**6)], "batch_size": 100}
    settings |= {"example_bytes": 10**4, "link_gb_per_s": 1.0, "num_towers": (1, 2, 4)}
    rows = {(row.exchange, row.num_towers): row for row in predict(**settings)}
    # alone, on the GPU: the batch in 1 ms, then 8 ms
    assert rows["round_robin", 1].step_seconds == pytest.approx(0.009)
    assert rows["round_robin", 1].efficiency == pytest.approx(1)
    # from the host: the weight and a quarter of the batch to each of four, and four gradients back
    assert rows["cpu", 4].compute_seconds == pytest.approx(0.002)
    assert rows["cpu", 4].transfer_seconds == pytest.approx(0.004 + 0.001 + 0.004)
    assert rows["cpu", 4].images_per_sec == pytest.approx(100 / 0.011)
    assert rows["cpu", 4].efficiency == pytest.approx(0.009 / 0.011 / 4)
    # the one GPU that has the weight sends it three times while the host sends the batch
    assert rows["least_loaded", 4].transfer_seconds == pytest.approx(0.003 + 0.003)
    assert rows["one_device", 4].transfer_seconds == pytest.approx(0.001 + 0.003 + 0.003)
    assert rows["ring", 4].transfer_seconds == pytest.approx(0.001 + 2 * 0.75 * 0.001)
    assert rows["ring", 2].transfer_seconds == pytest.approx(0.001 + 2 * 0.5 * 0.001)

    weak = {(row.exchange, row.num_towers): row for row in predict(**settings, per_device_batch=True)}
    assert weak["ring", 4].batch_size == 400
    assert weak["ring", 4].step_seconds == pytest.approx(0.008 + 0.004 + 0.0015)
    assert weak["ring", 4].efficiency == pytest.approx(0.009 / 0.0135)

    hidden = {(row.exchange, row.num_towers): row for row in predict(**settings, overlap=0.5)}
    assert hidden["ring", 4].step_seconds == pytest.approx(0.002 + 0.0025 - 0.001)
    assert hidden["ring", 1].step_seconds == pytest.approx(0.008)  # a transfer cannot take less than nothing


def test_latency_of_messages():
    """A millisecond a message, beside transfers that take no time to speak of; the batch is read in one."""
    settings = {"compute_seconds": 1.0, "variables": NET, "batch_size": 12, "link_gb_per_s": 1e9}

    def latencies(example_bytes, **more):
        rows = predict(**settings, example_bytes=example_bytes, num_towers=(1, 2, 4), latency_seconds=1e-3, **more)
        seconds: dict[str, list[float]] = {}
        for row in rows:
            seconds.setdefault(row.exchange, []).append(round(1000 * row.transfer_seconds, 3))
        return seconds

    assert latencies(10) == {
        "cpu": [2, 2, 2],  # read, gather
        "round_robin": [1, 2, 2],
        "least_loaded": [1, 2, 2],
        "one_device": [1, 3, 3],  # read, gather, scatter
        "ring": [1, 1 + 2 * 1, 1 + 2 * 3],
    }
    assert latencies(0, exchanges=["one_device", "ring"]) == {"one_device": [0, 2, 2], "ring": [0, 2, 6]}
    assert latencies(0, exchanges=["cpu"], gradient_device="/CPU:0") == {"cpu": [2, 2, 2]}
    assert latencies(0, exchanges=["round_robin"], gradient_device="/CPU:0") == {"round_robin": [0, 3, 3]}
    (row,) = predict(**settings, example_bytes=0, num_towers=[4], exchanges=["ring"], latency_seconds=0.1, overlap=1.0)
    assert row.step_seconds == pytest.approx(0.6)  # 0.25 s of computing hide as much of the latency


def test_compute_time_is_the_largest_shards():
    (row,) = predict(1.0, NET, 10, 0, 1.0, num_towers=[4], exchanges=["ring"])
    assert row.compute_seconds == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NET, "star", GPUS), "'star' is not one of cpu, round_robin, least_loaded, one_device, ring"),
        (([VariableBytes(1, "slot")], "cpu", GPUS), "not slot"),
        ((NET, "ring", []), "at least one tower"),
    ],
)
def test_step_bytes_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        step_bytes(*arguments)


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (8, {}, "8 examples cannot be shared by 64 devices"),
        (64, {"overlap": 2.0}, "overlap from 0 to 1"),
        (64, {"latency_seconds": -1e-3}, "latency_seconds=-0.001 is below 0"),
    ],
)
def test_predict_rejects(batch_size, options, message):
    with pytest.raises(ValueError, match=message):
        predict(1.0, NET, batch_size, 1, 1.0, **options)
